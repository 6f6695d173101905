"""An evaluation beside its draft's training: what training said of the draft, and a tracker run of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.config.schema import WandbConfig
from eagle3lab.config.selection import SIMULATED, STEP

from .run_dir import SUMMARY, read_json
from .tracking import build_wandb

TABLE = "evaluation"
PLOT = "acceptance"


def simulated_acceptance(draft: Path) -> dict[str, Any] | None:
    """What validation said of the exported weights, `acceptance_length` over `ttt_steps` steps.

    None: the draft lies in no run directory, or its run did not validate the update that was exported.
    """
    file = draft.parent / SUMMARY
    summary = read_json(file) if file.is_file() else {}
    for validation in (summary.get("best_validation"), summary.get("last_validation")):
        if validation and SIMULATED in validation and validation["update"] == summary.get("exported_update"):
            return {
                "acceptance_length": validation[SIMULATED],
                "ttt_steps": sum(key.startswith(STEP) for key in validation),
                "update": validation["update"],
            }
    return None


def track_evaluation(
    settings: WandbConfig,
    out: Path,
    setup: Mapping[str, Any],
    summary: Mapping[str, Any],
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    plot: Path,
) -> None:
    """Summary, table and plot as one run in `out`; nothing where W&B is disabled."""
    names = {"verifier": setup["verifier"]["name"], "prompts": setup["prompts"]["name"]}
    tracker = build_wandb(
        settings,
        run_dir=out,
        run_name=f"{Path(str(setup['draft'])).parent.name} on {names['prompts']}",
        config=setup,
        tags=[f"{group}:{name}" for group, name in {**names, "backend": setup["backend"]}.items()],
        group=None,
        job_type="evaluate",
    )
    if tracker is None:
        return
    failed = True
    try:
        tracker.log_table(TABLE, columns, rows)
        tracker.log_image(PLOT, plot)
        failed = False
    finally:
        tracker.finish(summary, failed=failed)
