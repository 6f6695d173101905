"""What each stage of the loop behind an exported draft took, read from the files it left."""

from __future__ import annotations

from pathlib import Path

from .run_dir import PROVENANCE, SUMMARY, read_json


def stage_seconds(draft: Path, evaluate_seconds: float) -> list[tuple[str, float]]:
    """Seconds of every stage behind an exported draft, as far as its files tell: fetch, extract, train, evaluate."""
    stages: list[tuple[str, float]] = []
    run_dir = draft.parent
    if (run_dir / PROVENANCE).is_file():
        log = Path(read_json(run_dir / PROVENANCE)["store"]["path"]) / "logs" / "extract.json"
        if log.is_file():
            runs = read_json(log)["runs"]
            seconds = {
                name: sum(run["seconds"].get(name, 0.0) for run in runs)
                for run in runs
                for name in run["seconds"]
            }
            stages.append(("fetch the verifier", seconds.pop("fetch", 0.0)))
            stages.append(("extract", sum(seconds.values())))
    if (run_dir / SUMMARY).is_file():
        stages.append(("train", read_json(run_dir / SUMMARY)["seconds"]))
    stages.append(("evaluate", evaluate_seconds))
    return stages
