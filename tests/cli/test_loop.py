"""The loop as a user types it, on the tiny verifier: extract, train, evaluate, and what goes wrong on the way."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle3lab.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_leaves_everything_that_is_needed_to_serve_and_to_repeat_it(trained: Path) -> None:
    assert {p.name for p in (trained / "draft").iterdir()} == {
        "config.json",
        "model.safetensors",
        "provenance.json",
        "trained_on.keys",
    }
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["noise"] == {"kind": "uniform", "scale": 0.05, "relative": False}
    assert config["run_name"].startswith("tiny-demo-eagle3-uniform0.05")
    assert Path(config["store"]).is_absolute()
    provenance = json.loads((trained / "provenance.json").read_text())
    assert provenance["choices"]["noise"] == "uniform0.05"
    assert "model=tiny" in provenance["overrides"]
    assert provenance["versions"]["speculators"].startswith("0.9")
    assert len(provenance["store"]["manifest_hash"]) == 64
    assert (trained / "curves.png").stat().st_size > 10_000
    assert (trained / "checkpoints" / "last.ckpt").is_file()
    with (trained / "metrics.csv").open() as f:
        rows = list(csv.DictReader(f))
    losses = [float(r["train/loss"]) for r in rows if r["train/loss"]]
    assert losses[-1] < losses[0]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["best_validation"]["val/simulated_acceptance_length"] > 1.0


def test_wandb_offline_writes_a_run_of_its_own(trained: Path) -> None:
    runs = list((trained / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    run_id = (trained / "wandb_run_id").read_text().strip()
    assert runs[0].name.endswith(run_id)
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["eagle3lab_run"]["wandb_run_id"] == run_id


def test_evaluate_measures_the_exported_draft(trained: Path, run_command: Callable[..., Any]) -> None:
    done = run_command(
        "evaluate.py", f"draft={trained / 'draft'}", "model=tiny", "hardware=cpu", "decode.max_new_tokens=24",
        "prompts.max_prompts=4", "decode.untrained=true", "decode.k=[2,3]",
    )  # fmt: skip
    content = json.loads((trained / "evaluation-demo" / "evaluation.json").read_text())
    lengths = {(v["variant"], v["k"]): v["overall"]["acceptance_length"] for v in content["variants"]}
    assert set(lengths) == {(name, k) for name in ("trained", "untrained") for k in (2, 3)}
    assert all(v["num_identical"] == 4 for v in content["variants"])
    assert (trained / "evaluation-demo" / "acceptance.png").is_file()
    for stage in ("extract", "train", "evaluate"):
        assert stage in done.stdout


def test_evaluations_of_a_sweep_are_not_written_over_each_other(
    trained: Path, run_command: Callable[..., Any]
) -> None:
    done = run_command(
        "evaluate.py", "-m", f"draft={trained / 'draft'}", "model=tiny", "hardware=cpu", "decode.k=[1],[2]", expect=2
    )  # fmt: skip
    assert "write their evaluations over each other: '2 in" in done.stderr
    assert "decode.k=[1,3,5]" in done.stderr


def test_extract_again_captures_nothing(
    trained: Path, run_command: Callable[..., Any], workspace: Path
) -> None:
    before = {p: p.read_bytes() for p in (workspace / "stores" / "tiny-demo").rglob("*.safetensors")}
    done = run_command("extract.py", "model=tiny", "hardware=cpu")
    assert "nothing to capture" in done.stdout
    assert before == {p: p.read_bytes() for p in before}


def test_a_taken_run_directory_is_refused_and_resume_goes_on_in_it(
    trained: Path, run_command: Callable[..., Any]
) -> None:
    arguments = (
        "model=tiny", "hardware=cpu", "noise=uniform0.05", "train.seq_len=512", "optim.lr=3e-3",
        "optim.lr_warmup_updates=3", "run_dir=first",
    )  # fmt: skip
    refused = run_command("train.py", *arguments, expect=2)
    assert "the run directory is taken" in refused.stderr
    assert "resume=true" in refused.stderr
    before = (trained / "draft" / "model.safetensors").read_bytes()
    run_id = (trained / "wandb_run_id").read_text()
    run_command("train.py", *arguments, "resume=true", "logger=wandb_offline")
    assert (trained / "draft" / "model.safetensors").read_bytes() == before  # a finished run does no more
    assert (trained / "wandb_run_id").read_text() == run_id
    # offline, every start has a folder of its own; the id in its name makes them one run
    assert {p.name.split("-")[-1] for p in (trained / "wandb").glob("offline-run-*")} == {run_id.strip()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("model=tiny", "store=nowhere"),
            ["there is no hidden-state store", "nowhere", "python extract.py hardware=cpu model=tiny store="],
        ),
        (
            ("model=tiny", "draft.aux_layer_ids=[1,2]", "hardware=cpu2", "train.tokens_per_update=5000"),
            ["multiple of 4096"],
        ),
        (("model=tiny", "resume=true", "run_dir=never"), ["nothing to resume"]),
    ],
)
def test_what_cannot_run_says_so_before_anything_is_written(
    arguments: tuple[str, ...],
    says: list[str],
    trained: Path,
    run_command: Callable[..., Any],
    workspace: Path,
) -> None:
    done = run_command("train.py", "hardware=cpu", *arguments, "outputs=untouched", expect=2)
    assert all(text in done.stderr for text in says), done.stderr
    assert "Traceback" not in done.stderr
    assert not (workspace / "untouched").exists()


@pytest.fixture(scope="module")
def other_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shapes, configuration, tokenizer and embedding of the tiny one, another final norm: a retrained verifier."""
    from safetensors.torch import load_file, save_file

    from eagle3lab.verifier.locate import asset_path

    other = tmp_path_factory.mktemp("verifiers") / "other_verifier"
    shutil.copytree(asset_path("tiny"), other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def test_a_store_of_another_verifier_is_refused(
    trained: Path, run_command: Callable[..., Any], other_verifier: Path
) -> None:
    """Only the fingerprint of the weights can tell."""
    done = run_command(
        "train.py", "model=local", "model.name=other", f"model.path={other_verifier}", "model.aux_layer_ids=[1,2,3]",
        "hardware=cpu", "store=stores/tiny-demo", expect=2,
    )  # fmt: skip
    assert "the store is of another verifier (tiny); they differ in weight_fingerprint: {" in done.stderr
    assert "; expected {" in done.stderr
    assert "store=DIRECTORY of this verifier" in done.stderr


def test_a_draft_of_another_verifier_is_refused_with_the_reason(
    trained: Path, run_command: Callable[..., Any], other_verifier: Path
) -> None:
    """Only the fingerprint of the weights can tell."""
    done = run_command(
        "evaluate.py", f"draft={trained / 'draft'}", "model=local", "model.name=other",
        f"model.path={other_verifier}", "model.demo=tiny_chat", "hardware=cpu", expect=2,
    )  # fmt: skip
    config = json.loads((trained / "draft" / "config.json").read_text())
    assert "belongs to another verifier" in done.stderr
    assert (
        f"weight fingerprint of the draft's verifier: '{config['verifier_weight_fingerprint']}'"
        in done.stderr
    )
    assert "config hash" not in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_that_the_draft_was_trained_on_are_refused_whatever_their_template_case_and_spacing(
    trained: Path, run_command: Callable[..., Any], workspace: Path
) -> None:
    from eagle3lab.rows.files import read_file

    index = (workspace / "stores" / "tiny-demo" / "index.jsonl").read_text()
    row = next(r for line in index.splitlines() for r in json.loads(line)["rows"] if r["split"] == "train")
    records = {record.source: record.value for record in read_file("asset:tiny_chat/conversations.jsonl.xz")}
    seen = records[row["source"]]["messages"][0]["content"]
    (workspace / "other.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{{ eos_token }}{% endfor %}<bot>"
    )
    planted = {"id": "planted", "messages": [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": f"  {seen.upper()}".replace(" ", "\n ")},
    ]}  # fmt: skip
    prompts = [{"id": "new", "turns": [f"{seen} And why?"]}, planted]
    (workspace / "planted.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    done = run_command(
        "evaluate.py", f"draft={trained / 'draft'}", "model=tiny", "hardware=cpu", "prompts=jsonl",
        "prompts.path=planted.jsonl", "model.template=other.jinja", expect=2,
    )  # fmt: skip
    assert "was trained on 1 of the 2 prompts of jsonl: 'planted'" in done.stderr
    assert "prompts.leave_out_trained_on=true" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (trained / "evaluation-jsonl").exists()


def test_a_rerun_of_a_cpu_run_is_equal_to_the_bit(
    trained: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # another directory than the run's: its paths are its own
    for name, value in (("EAGLE3LAB_STAMP", "again"), ("OMP_NUM_THREADS", "1"), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    assert main(["rerun", str(trained)]) == 0
    said = capsys.readouterr().out
    again = tmp_path / "outputs" / f"rerun-{trained.name}" / "again"
    assert "configuration  the same" in said
    assert "environment    the same" in said
    assert "rows, timings apart" in said
    assert "weights        equal to the bit, sha256 " in said
    files = [path / "draft" / "model.safetensors" for path in (trained, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    report = json.loads((again / "rerun.json").read_text())
    assert (report["configuration"], report["environment"], report["metrics"]) == ({}, {}, {})
    old, new = (json.loads((path / "provenance.json").read_text()) for path in (trained, again))
    assert new["choices"].items() == {k: v for k, v in old["choices"].items() if v is not None}.items()
    assert (again / "wandb_run_id").read_text() != (trained / "wandb_run_id").read_text()

    # a store that is not there, and another one, are each one message before anything starts
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved, ignore=shutil.ignore_patterns("checkpoints", "wandb"))
    provenance = json.loads((moved / "provenance.json").read_text())
    provenance["store"]["manifest_hash"] = "0" * 64
    (moved / "provenance.json").write_text(json.dumps(provenance))
    assert main(["rerun", str(moved), "--out", "new"]) == 2
    assert "is another one than the run was trained on" in capsys.readouterr().err
    assert main(["rerun", str(trained), "--store", "nowhere", "--out", "new"]) == 2
    assert "the store of the run is missing or unfinished: 'nowhere'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
