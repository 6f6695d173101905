"""An extraction is a W&B run of its own kind, beside the store's own log."""

from __future__ import annotations

from pathlib import Path

from eagle3lab.config.invocation import Invocation
from eagle3lab.config.schema import (
    DataConfig,
    ExtractRoot,
    HardwareConfig,
    LoggerConfig,
    ModelConfig,
    WandbConfig,
    WandbMode,
)
from eagle3lab.experiments.extraction_run import track_extraction

from .wandb_files import read_runs


def test_an_extraction_has_its_own_job_type_figures_and_id(tmp_path: Path) -> None:
    invocation = Invocation(cwd=tmp_path, choices={"model": "tiny", "data": "demo"})
    for mode in (WandbMode.disabled, WandbMode.offline, WandbMode.offline):
        cfg = ExtractRoot(
            model=ModelConfig(name="tiny"),
            data=DataConfig(name="demo"),
            hardware=HardwareConfig(name="cpu"),
            logger=LoggerConfig(WandbConfig(mode=mode)),
        )
        (tmp_path / "logs").mkdir(exist_ok=True)
        track_extraction(cfg, invocation, tmp_path, {"num_tokens": 18005, "tokens_per_second": None})
    first, again = read_runs(tmp_path)
    assert first.run_id == again.run_id == (tmp_path / "logs" / "wandb_run_id").read_text().strip()
    assert (first.job_type, first.exit_code) == ("extract", 0)
    assert first.config["extract"]["dtype"] == "bfloat16"
    assert first.summary["num_tokens"] == 18005
    assert {"model:tiny", "data:demo"} <= set(first.tags)
