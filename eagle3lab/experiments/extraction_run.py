"""An extraction as a tracker run of its own, in the `logs/` of its store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3lab.config.invocation import Invocation
from eagle3lab.config.schema import ExtractRoot

from .tracking import build_wandb


def track_extraction(
    cfg: ExtractRoot, invocation: Invocation, store: Path, summary: Mapping[str, Any]
) -> None:
    """Configuration and figures of a finished extraction; a resumed one keeps its run id. Nothing where W&B is off."""
    content = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    assert isinstance(content, dict)
    tracker = build_wandb(
        cfg.logger.wandb,
        run_dir=store / "logs",
        run_name=f"store {store.name}",
        config={str(key): value for key, value in content.items()},
        tags=[f"{group}:{option}" for group, option in invocation.groups().items()],
        group=invocation.sweep_dir.name if invocation.sweep_dir else None,
        job_type="extract",
    )
    if tracker is not None:
        tracker.finish({key: value for key, value in summary.items() if value is not None})
