from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab.config.schema import WandbConfig, WandbMode
from eagle3lab.experiments.evaluation_run import simulated_acceptance, track_evaluation

VALIDATION = {"update": 40, "val/simulated_acceptance_length": 1.4, "val/acceptance_step0": 0.3,
              "val/acceptance_step1": 0.1, "val/loss": 2.0}  # fmt: skip


def write(run_dir: Path, **summary: object) -> Path:
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir / "draft"


def test_what_training_simulated_is_that_of_the_exported_update(tmp_path: Path) -> None:
    last = {**VALIDATION, "update": 50, "val/simulated_acceptance_length": 1.3}
    draft = write(tmp_path, best_validation=VALIDATION, last_validation=last, exported_update=40)
    assert simulated_acceptance(draft) == {"acceptance_length": 1.4, "ttt_steps": 2, "update": 40}
    draft = write(tmp_path, best_validation=VALIDATION, last_validation=last, exported_update=50)
    assert simulated_acceptance(draft) == {"acceptance_length": 1.3, "ttt_steps": 2, "update": 50}


@pytest.mark.parametrize("exported", [45, None])
def test_another_update_than_was_validated_says_nothing(tmp_path: Path, exported: int | None) -> None:
    draft = write(tmp_path, best_validation=VALIDATION, last_validation={}, exported_update=exported)
    assert simulated_acceptance(draft) is None
    assert simulated_acceptance(tmp_path / "elsewhere" / "draft") is None


def test_an_evaluation_is_a_run_of_its_own_in_its_directory(tmp_path: Path) -> None:
    plot = tmp_path / "acceptance.png"
    plot.write_bytes(ONE_PIXEL)
    setup = {
        "verifier": {"name": "v"},
        "prompts": {"name": "p"},
        "backend": "hf",
        "draft": str(tmp_path / "draft"),
    }
    figures = {"trained/k3/T0/acceptance_length": 1.5}
    out = tmp_path / "evaluation"
    out.mkdir()
    for mode, folders in ((WandbMode.disabled, 0), (WandbMode.offline, 1)):
        track_evaluation(
            WandbConfig(mode=mode), out, setup, figures, ["k", "low"], [[3, 1.4], [5, None]], plot
        )
        assert len(list(out.glob("wandb/offline-run-*"))) == folders
    tables = list(out.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert [json.loads(t.read_text())["data"] for t in tables] == [[[3, 1.4], [5, None]]]


ONE_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360f8cfc0f01f0005050102a5b0b2a20000000049454e44ae426082"
)
