"""Weights & Biases, when asked: online, offline or disabled, one run per training, resumed under its own id.

The CSV beside it is written by the training room and never depends on this file.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.names import METRICS
from eagle3lab.config.schema import WandbConfig, WandbMode

RUN_ID = "wandb_run_id"


class WandbTracker:
    """One W&B run. `figures` carry their own x-axes, `tokens` and `update`; W&B's internal step is not used.

    A run that is resumed offline gets a folder of its own under the same id. It begins with the points of
    `metrics.csv`, which holds what the checkpoint knows: the last folder is the whole run, one point per update.
    """

    def __init__(
        self,
        settings: WandbConfig,
        *,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        tags: Sequence[str],
        group: str | None,
        job_type: str = "train",
    ) -> None:
        import wandb

        run_id_file = run_dir / RUN_ID
        resumed = run_id_file.is_file()
        # an agent of `wandb sweep` names the run that it waits for; a name from elsewhere would join trials
        named = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        run_id = named or secrets.token_hex(4)
        if resumed:
            run_id = run_id_file.read_text().strip()
        self._earlier = run_dir / METRICS if resumed and settings.mode is WandbMode.offline else None
        try:
            self._run = wandb.init(
                mode=settings.mode.value,
                project=settings.project,
                entity=settings.entity,
                group=settings.group or group,
                job_type=job_type,
                tags=[*settings.tags, *tags],
                name=run_name,
                id=run_id,
                resume="allow" if settings.mode is WandbMode.online else None,
                dir=str(run_dir),
                config=json.loads(json.dumps(config, default=str)),
                reinit="finish_previous",
            )
        except (wandb.errors.CommError, wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                Problem(
                    "W&B did not start", str(error), "a reachable server and a login", "logger=wandb_offline"
                )
            ) from error
        run_id_file.write_text(run_id + "\n")
        self._run.define_metric("update")
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def log(self, figures: Mapping[str, float]) -> None:
        """One point of every figure given."""
        self._log_earlier(before=figures.get("update"))
        self._run.log(dict(figures))

    def _log_earlier(self, before: float | None) -> None:
        """Once, the points of the parts before this one; `before`: the first update of this one."""
        if self._earlier is not None:
            for point in _points(self._earlier):
                if before is None or point["update"] < before:
                    self._run.log(point)
        self._earlier = None

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """One table of plain values; None is an empty cell."""
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_image(self, name: str, path: Path) -> None:
        """One picture from a file."""
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def finish(self, summary: Mapping[str, Any], *, failed: bool = False) -> None:
        """Write the summary and close the run, so that the next job of a sweep gets a run of its own."""
        self._log_earlier(before=None)
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if failed else 0)


def _points(metrics: Path) -> Iterator[dict[str, float]]:
    """The rows of a metrics.csv, without their empty cells."""
    if metrics.is_file():
        with metrics.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {name: float(text) for name, text in row.items() if text}


def build_wandb(
    settings: WandbConfig,
    *,
    run_dir: Path,
    run_name: str,
    config: Mapping[str, Any],
    tags: Sequence[str],
    group: str | None,
    job_type: str = "train",
) -> WandbTracker | None:
    """The tracker, or None when it is disabled."""
    if settings.mode is WandbMode.disabled:
        return None
    return WandbTracker(
        settings,
        run_dir=run_dir,
        run_name=run_name,
        config=config,
        tags=tags,
        group=group,
        job_type=job_type,
    )
