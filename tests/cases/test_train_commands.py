"""TRN, CKP and VOC cases as their own command: what `train.py` trains, prints, leaves and exits with."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_run import expected, train_words
from safetensors.torch import load_file

from eagle3lab.config.errors import EXIT_STOPPED, EXIT_USER_ERROR
from eagle3lab.draft.export import read_export
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.training import module as training_module
from eagle3lab.training.checkpoint_files import LAST, find_resume_point
from eagle3lab.training.checkpoints import Checkpoints

CASES = Path(__file__).parent
Command = Callable[..., Any]
QUICK = ("data.validation_share=0", "train.self_test=false", "optim.lr_warmup_updates=0")


class Killed(Exception):
    pass


def test_trn_16_three_rows_are_one_update_and_one_row_is_too_few_for_two_ranks(
    extract_command: Command, tmp_path: Path
) -> None:
    store = extract_command("TRN-16", QUICK[0])
    length = max(row.length for row in store.reader.rows)
    words = train_words("TRN-16", length)
    done = extract_command("TRN-16", *words, *QUICK, f"run_dir={tmp_path / 'run'}", entry="train")
    assert "updates            1 of" in done.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 1
    (tmp_path / "one.jsonl").write_text((CASES / "TRN-16" / "data.jsonl").read_text().splitlines()[0] + "\n")
    one = (QUICK[0], f"data.paths=[{tmp_path / 'one.jsonl'}]")
    extract_command("TRN-16", *one, store="one")
    refused = extract_command(
        "TRN-16", *one, *words, *QUICK[1:], "hardware=cpu2", f"run_dir={tmp_path / 'two'}", store="one",
        entry="train", expect=EXIT_USER_ERROR,
    )  # fmt: skip
    assert "no update to make" in refused.err
    assert "1 rows in 1 packs for 2 devices" in refused.err
    assert not (tmp_path / "two").exists()


def test_trn_12_a_negative_width_is_a_mistake_in_the_configuration(extract_command: Command) -> None:
    refused = extract_command(
        "TRN-12", "noise=uniform0.05", "noise.scale=-0.1", entry="train", expect=EXIT_USER_ERROR
    )
    assert "noise.scale: -0.1" in refused.err


def test_voc_02_maps_that_lie_in_the_data_folder_are_never_used(
    extract_command: Command, tmp_path: Path
) -> None:
    """The case's files beside the data, in the store and in the run's place; the maps are the store's own."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(CASES / "TRN-16" / "data.jsonl", data / "data.jsonl")
    paths = f"data.paths=[{data / 'data.jsonl'}]"
    store = extract_command("VOC-02", paths, QUICK[0])
    for place in (data, store.store, tmp_path):
        for name in ("d2t-4.npy", "d2t.npy", "t2d.npy"):
            shutil.copy(CASES / "VOC-02" / name, place / name)
    length = max(row.length for row in store.reader.rows)
    asked = expected("VOC-02")["ask"]["draft_vocab_size"]
    for size in (asked, "null"):
        run_dir = tmp_path / f"run-{size}"
        extract_command(
            "VOC-02", paths, *QUICK, f"train.seq_len={length}", f"draft.vocab_size={size}", "train.max_updates=2",
            f"run_dir={run_dir}", entry="train",
        )  # fmt: skip
        config, tensors = read_export(run_dir / "draft")
        if size == "null":
            assert config["draft_vocab_size"] == 264
            assert len(tensors["lm_head.weight"]) == 264
        else:
            wanted = DraftVocabulary.from_counts(store.reader.token_counts(), asked, always_keep=[258])
            assert config["draft_vocab_size"] == asked == len(tensors["d2t"])
            assert torch.equal(tensors["d2t"], wanted.d2t)
            assert torch.equal(tensors["t2d"], wanted.t2d)
        said = json.loads((run_dir / "draft" / "provenance.json").read_text())
        assert {"manifest_hash", "tokenizer_hash"} <= said["store"].keys()


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The store's rows in the order in which they were trained."""
    seen: list[int] = []
    original = training_module.Eagle3Module.training_step

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        seen.extend(batch["row_index"].tolist())
        original(self, batch, batch_idx)

    monkeypatch.setattr(training_module.Eagle3Module, "training_step", step)
    return seen


@pytest.fixture
def ckp_01(extract_command: Command, tmp_path: Path) -> Callable[..., Any]:
    """The command of CKP-01 with a run directory of its own; the store is there."""
    store = extract_command("CKP-01", QUICK[0])
    words = train_words("CKP-01", max(row.length for row in store.reader.rows))

    def train(name: str, *more: str, expect: int = 0) -> Any:
        return extract_command(
            "CKP-01", *words, *QUICK, "train.log_every_updates=1", f"run_dir={tmp_path / name}", *more,
            entry="train", expect=expect,
        )  # fmt: skip

    return train


def same_draft(one: Path, two: Path) -> bool:
    first, second = (load_file(path / "draft" / "model.safetensors") for path in (one, two))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_ckp_01_a_killed_command_resumes_with_the_rows_it_had_left(
    ckp_01: Callable[..., Any], rows_seen: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = expected("CKP-01")
    ckp_01("whole")
    whole = list(rows_seen)
    rows_seen.clear()
    with monkeypatch.context() as patch:
        # the log of an update comes before its save: the case's kill after update 6
        original = training_module.Eagle3Module.training_step

        def killed(self: Any, batch: Any, batch_idx: int) -> None:
            if self.num_updates == case["killed_after"]:
                raise Killed
            original(self, batch, batch_idx)

        patch.setattr(training_module.Eagle3Module, "training_step", killed)
        with pytest.raises(Killed):
            ckp_01("run")
    assert find_resume_point(tmp_path / "run" / "checkpoints").num_updates == case["resume_from"]
    assert rows_seen == whole[: case["killed_after"]]
    rows_seen.clear()
    done = ckp_01("run", "resume=true")
    assert f"{case['resume_from']} of 20 updates made" in done.out
    assert "left: 16 rows" in done.out
    assert rows_seen == whole[case["resume_from"] :]
    assert sorted(whole[:10]) == sorted(whole[10:]) == list(range(10))
    assert same_draft(tmp_path / "whole", tmp_path / "run")


def test_ckp_01_a_run_that_gets_a_sigterm_saves_and_says_how_to_go_on(
    ckp_01: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckp_01("whole")
    original = training_module.Eagle3Module.training_step

    def terminated(self: Any, batch: Any, batch_idx: int) -> None:
        if self.num_updates == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(training_module.Eagle3Module, "training_step", terminated)
        done = ckp_01("run", expect=EXIT_STOPPED)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "stopped by SIGTERM after update 7 of 20; everything is saved" in done.err
    assert not (tmp_path / "run" / "draft").exists()
    command = re.search(r"try: python train\.py (.*)", done.err)
    assert command is not None
    words = shlex.split(command[1])
    assert {"noise=uniform0.05", f"run_dir={tmp_path / 'run'}", "resume=true"} <= set(words)
    resumed = ckp_01("run", "resume=true")
    assert "7 of 20 updates made" in resumed.out
    assert same_draft(tmp_path / "whole", tmp_path / "run")


def test_ckp_04_a_disk_that_is_full_ends_the_command_with_an_exit_code(
    ckp_01: Callable[..., Any], tmp_path: Path
) -> None:
    """A limit on the size of files, below a checkpoint's, as the case's tool sets it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        done = ckp_01("run", expect=EXIT_USER_ERROR)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "errno 27" in done.err
    assert "another run_dir" in done.err  # there is nothing to resume
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert not (tmp_path / "run" / "draft").exists()


def test_ckp_07_a_checkpoint_says_its_configuration_in_plain_data(
    ckp_01: Callable[..., Any], tmp_path: Path
) -> None:
    ckp_01("run", "train.max_updates=1")
    content = torch.load(tmp_path / "run" / "checkpoints" / LAST, weights_only=True)
    about = content["eagle3lab_run"]
    assert about["config"]["noise"] == {"kind": "uniform", "scale": 0.05, "relative": False}
    assert "train.max_updates=1" in about["provenance"]["overrides"]
    json.dumps(about)
    assert Checkpoints.__name__ in str(list(content["callbacks"]))
