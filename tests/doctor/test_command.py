from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab.__main__ import main
from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import Accelerator, Backend, ExtractorConfig, TrainRoot
from eagle3lab.doctor import command, preflight
from eagle3lab.doctor.check import Check, Status, examine, fail
from eagle3lab.doctor.miniature import CHOICES

LAYERS = ["packages", "symbols", "machine", "verifier", "store", "miniature"]


@pytest.fixture
def words(whole_store: Path, tmp_path: Path) -> list[str]:
    return ["model=tiny", "hardware=cpu", f"store={whole_store}", f"outputs={tmp_path}"]


def test_a_healthy_machine_passes_every_layer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line in LAYERS] == LAYERS
    assert "one update on cpu" in text
    assert text.splitlines()[-1].endswith("0 warn, 0 fail; exit code 0")
    assert "FAIL" not in text


def test_json_is_the_only_thing_on_stdout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", words[0], "--quick", *words[1:]]) == 0  # options stand anywhere
    content = json.loads(capsys.readouterr().out)
    assert content["status"] == "ok"
    assert {check["layer"] for check in content["checks"]} == set(LAYERS) - {"miniature"}
    assert set(content["checks"][0]) == {"layer", "name", "status", "found", "remedy", "seconds"}


def test_a_fault_gives_exit_code_2_and_later_layers_still_run(
    store: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "manifest.json").write_text("{")
    broken = [word for word in words if not word.startswith("store=")]
    assert (
        main(["doctor", "--quick", "--json", *broken, f"store={store}", "data.paths=[/nowhere.jsonl]"]) == 2
    )
    checks = json.loads(capsys.readouterr().out)["checks"]
    failed = [(check["layer"], check["name"]) for check in checks if check["status"] == "fail"]
    assert failed == [("verifier", "conversations"), ("store", "manifest"), ("store", "index and headers")]
    assert all(check["remedy"] for check in checks if check["status"] != "ok")


def test_wrong_words_are_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "model=tiny", "noise=unifrom0.05", "train.seq_len=1"]) == 2
    captured = capsys.readouterr()
    assert "noise=uniform0.05" in captured.err
    assert "train.seq_len" in captured.err
    assert captured.out == ""


def test_a_package_that_cannot_be_imported_is_a_finding_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(command, "_machine", broken)
    checks = list(command.all_checks(["model=tiny", "hardware=cpu"], quick=True))
    (machine,) = [check for check in checks if check.layer == "machine"]
    assert machine.status is Status.fail
    assert "No module named 'torch'" in machine.found
    assert any(check.layer == "store" for check in checks)


def test_a_failing_step_of_the_miniature_ends_that_layer_only(
    cfg: TrainRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3lab.doctor import miniature

    def broken(*_: object) -> str:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(miniature, "_extract", broken)
    (check,) = miniature.check_miniature(cfg, Accelerator.cpu)
    assert check.status is Status.fail
    assert "no kernel image" in check.found
    assert "model=tiny" in CHOICES


def test_a_finding_that_is_not_ok_must_name_a_remedy() -> None:
    with pytest.raises(AssertionError, match="names no remedy"):
        Check("layer", "name", Status.fail, "something")
    raised = examine("layer", "name", lambda: 1 / 0, "another number")  # type: ignore[arg-type,return-value]
    assert (raised.status, raised.remedy) == (Status.fail, "another number")


def test_the_commands_own_part_is_one_line_when_all_is_well(cfg: TrainRoot, tmp_path: Path) -> None:
    for text in (
        preflight.before_training(cfg.hardware, tmp_path / "run"),
        preflight.before_extraction(ExtractorConfig(backend=Backend.hf), cfg.hardware, tmp_path / "store"),
    ):
        assert text.startswith("doctor: ")
        assert "checks ok" in text
        assert len(text.splitlines()) == 1


def test_the_commands_own_part_refuses_to_start_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = examine("packages", "transformers", lambda: fail("9.9, needed is <6", "pip install x"), "")
    monkeypatch.setattr(preflight, "check_packages", lambda: iter([broken]))
    with pytest.raises(UserError, match=r"doctor: transformers: 9\.9, needed is <6") as raised:
        preflight.preflight("extract", tmp_path, num_processes=1, without=("vllm",))
    fix = raised.value.problems[0].fix
    assert fix.startswith("pip install x\n")
    assert "EAGLE3LAB_DOCTOR=warn" in fix
    monkeypatch.setenv(preflight.MODE_VARIABLE, "warn")
    text = preflight.preflight("extract", tmp_path, num_processes=1, without=("vllm",))
    assert "doctor: fail: transformers" in text
