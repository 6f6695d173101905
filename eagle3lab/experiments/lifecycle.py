"""The beginning and the end of a run: its directory, its provenance, its tracker, its export."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from eagle3lab.config.invocation import Invocation
from eagle3lab.config.names import METRICS, honest_choices
from eagle3lab.config.schema import TrainRoot
from eagle3lab.config.stamp import is_rank_zero
from eagle3lab.draft.export import export_draft
from eagle3lab.store.files import disk_errors, write_text
from eagle3lab.store.manifest import Manifest, manifest_hash
from eagle3lab.store.trained_on import TRAINED_ON_FILE

from .plots import plot_curves
from .provenance import collect, package_versions
from .run_dir import CONFIG, PROVENANCE, SUMMARY, claimed, only_run_in, write_json
from .tracking import WandbTracker, build_wandb

if TYPE_CHECKING:
    from eagle3lab.draft.speculators_model import Eagle3DraftModel


def shared_facts(cfg: TrainRoot, invocation: Invocation, manifest: Manifest) -> dict[str, str]:
    """What every process of a run must have alike, whatever node it is on."""
    return {
        "run_dir": str(cfg.run_dir),
        "store (by its manifest's hash)": manifest_hash(manifest),
        "command": " ".join(invocation.overrides),
        "installation": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
    }


@contextmanager
def begun_run(
    cfg: TrainRoot, invocation: Invocation, run_dir: Path, manifest: Manifest
) -> Iterator[dict[str, Any]]:
    """Claim the run directory and say in it where everything came from: that is yielded.

    {} in the processes that do not write. A run that is refused before it has trained leaves nothing.
    """
    if not is_rank_zero():
        yield {}
        return
    with claimed(run_dir, resume=cfg.resume):
        yield _write_beginning(cfg, invocation, run_dir, manifest)


def _write_beginning(
    cfg: TrainRoot, invocation: Invocation, run_dir: Path, manifest: Manifest
) -> dict[str, Any]:
    """The resolved configuration and where everything came from; returns the latter."""
    provenance = collect(overrides=invocation.overrides, choices=invocation.choices)
    provenance["store"] = {
        "path": str(cfg.store),
        "manifest_hash": manifest_hash(manifest),
        "weight_fingerprint": manifest.verifier.weight_fingerprint,
        "tokenizer_hash": manifest.tokenizer_hash,
        "template_hash": manifest.template_hash,
        "template_args": manifest.row_settings.get("template_args", {}),
    }
    text = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    if cfg.resume:
        for line in _changed_lines((run_dir / CONFIG).read_text(encoding="utf-8"), text):
            print(f"resume: the stored configuration differs: {line}")
    else:
        with disk_errors(run_dir, "room for a run", "free space, or outputs=DIRECTORY on another disk"):
            write_text(run_dir / CONFIG, text)
            write_json(run_dir / PROVENANCE, provenance)
    return provenance


def _changed_lines(old: str, new: str) -> list[str]:
    """Lines that differ between two configurations, as `- old` and `+ new`."""
    return [
        line
        for line in difflib.ndiff(old.splitlines(), new.splitlines())
        if line.startswith(("- ", "+ ")) and not line.strip("+- ").startswith("resume:")
    ]


def _plain(cfg: TrainRoot) -> dict[str, Any]:
    """The configuration as nested plain data, enums by name."""
    content = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def about(cfg: TrainRoot, provenance: Mapping[str, Any], tracker: WandbTracker | None) -> dict[str, Any]:
    """What every checkpoint says of its run: configuration, provenance, W&B id, as JSON would hold them."""
    said = {"config": _plain(cfg), "provenance": provenance, "wandb_run_id": tracker and tracker.run_id}
    content = json.loads(json.dumps(said, default=str))
    assert isinstance(content, dict)
    return content


@contextmanager
def tracked(
    cfg: TrainRoot, invocation: Invocation, run_dir: Path, provenance: dict[str, Any]
) -> Iterator[tuple[WandbTracker | None, dict[str, Any]]]:
    """The run's tracker (None on other ranks and when disabled) and a dict that becomes its summary.

    It is closed also when the run fails, and says so, so that the next job of a sweep gets one of its own.
    Nobody else goes on in the run directory meanwhile.
    """
    results: dict[str, Any] = {}
    chosen = honest_choices(invocation.groups(), invocation.overrides, cfg)
    if not is_rank_zero():
        yield None, results
        return
    with only_run_in(run_dir):
        tracker = build_wandb(
            cfg.logger.wandb,
            run_dir=run_dir,
            run_name=str(cfg.run_name),
            config={**_plain(cfg), "provenance": provenance},
            tags=[f"{group}:{option}" for group, option in chosen.items()],
            group=str(invocation.sweep_dir.name) if invocation.sweep_dir else None,
        )
        failed = True
        try:
            yield tracker, results
            failed = False
        finally:
            if tracker:
                tracker.finish(results, failed=failed)


def finish_run(
    cfg: TrainRoot,
    draft: Eagle3DraftModel,
    run_dir: Path,
    summary: dict[str, Any],
    provenance: dict[str, Any],
) -> None:
    """Export the draft, draw the curves, write `summary.json` last: where it is, the run is whole."""
    keys = Path(str(cfg.store)) / TRAINED_ON_FILE  # stores of earlier versions have none
    fix = f"free space, then the same command with resume=true run_dir={run_dir}: the checkpoints hold"
    with disk_errors(run_dir, "room for the export", fix):
        export_draft(
            draft,
            run_dir / "draft",
            {
                **provenance,
                "run_name": cfg.run_name,
                "updates": summary["exported_update"],
                "weights": summary["exported_weights"],
                "selection": summary["selection"],
            },
            verifier_fingerprint=provenance["store"]["weight_fingerprint"],
            trained_on=keys if keys.is_file() else None,
        )
        plot_curves(run_dir / METRICS, run_dir / "curves.png", str(cfg.run_name))
        write_json(run_dir / SUMMARY, summary)
