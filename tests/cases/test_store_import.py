"""EXT and SEC cases on the way into a store: the import of older files, and two writers of one store."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import EXIT_USER_ERROR, IntegrityError, UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.extract.import_samples import import_samples
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter

from ..warm import ROOT, WarmPython

CASES = Path(__file__).parent
SHARED = CASES / "_shared"


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


def copy_with_masks(files: list[Path], directory: Path, *, metadata: bool = True) -> Path:
    """The case's files as hs_<i>.safetensors, each with a mask of its own (they came with a data file)."""
    from safetensors import safe_open

    directory.mkdir()
    for i, file in enumerate(files):
        tensors = load_file(file)
        mask = torch.ones_like(tensors["token_ids"])
        with safe_open(file, "pt") as handle:
            origin = handle.metadata() if metadata else None
        save_file({**tensors, "loss_mask": mask}, directory / f"hs_{i}.safetensors", metadata=origin)
    return directory


def run(source: Path, store: Path, target: str) -> StoreReader:
    verifier = SHARED / target
    model = ModelConfig(name=target, path=str(verifier))
    import_samples(source, store, model, verifier, layer_ids=[2, 4, 5], say=lambda _: None)
    return StoreReader(store, verify="full")


def test_ext_05_the_import_keeps_the_state_before_the_final_norm(tmp_path: Path) -> None:
    source = copy_with_masks([CASES / "EXT-05" / "hs_raw.safetensors"], tmp_path / "raw")
    last = run(source, tmp_path / "store", "target_ladder").read(0)["verifier_last_hidden_states"]
    assert torch.equal(last, torch.full_like(last, expected("EXT-05")["last_slot_value"]))


@pytest.mark.parametrize(
    ("marked", "message"), [(True, "after_final_norm"), (False, "instead of layer 8 before the final norm")]
)
def test_ext_05_the_import_refuses_a_normed_last_state_marked_or_not(
    tmp_path: Path, marked: bool, message: str
) -> None:
    file = CASES / "EXT-05" / "hs_normed.safetensors"
    source = copy_with_masks([file], tmp_path / "normed", metadata=marked)
    with pytest.raises(IntegrityError, match=message):
        run(source, tmp_path / "store", "target_ladder")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("name", "what"), expected("EXT-08")["rejected"].items())
def test_ext_08_the_import_refuses_non_finite_states_with_file_count_and_slot(
    tmp_path: Path, name: str, what: str
) -> None:
    source = copy_with_masks([CASES / "EXT-08" / f"{name}.safetensors"], tmp_path / "old")
    count, slot = what.split(", ")
    with pytest.raises(IntegrityError, match=rf"hs_0\.safetensors: {count} in {slot}"):
        run(source, tmp_path / "store", "target_tiny")
    assert not (tmp_path / "store").exists()


def test_ext_10_the_import_names_the_cut_file_and_writes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "partial_output"
    shutil.copytree(CASES / "EXT-10" / "partial_output", source)
    with (
        pytest.raises(IntegrityError, match=r"hs_1\.safetensors is refused"),
        pytest.warns(UserWarning, match="2 files are no samples"),
    ):
        run(source, tmp_path / "store", "target_tiny")
    assert not (tmp_path / "store").exists()


def test_ext_11_the_import_never_pairs_states_with_other_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    files = sorted((CASES / "EXT-11" / "output_of_v1").glob("hs_*.safetensors"))
    ids = [load_file(file)["token_ids"].tolist() for file in files]
    rows = [{"input_ids": some, "loss_mask": [1] * len(some), "seq_len": len(some)} for some in ids[::-1]]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    (tmp_path / "data" / "hidden_states").mkdir()
    for file in files:
        shutil.copy(file, tmp_path / "data" / "hidden_states")
    with pytest.raises(IntegrityError, match=f"{len(files)} of {len(files)} files do not belong"):
        run(tmp_path / "data", tmp_path / "store", "target_tiny")
    assert not (tmp_path / "store").exists()


def test_ext_12_the_command_that_runs_out_of_room_ends_with_code_2_and_goes_on_later(
    tmp_path: Path, warm_python: WarmPython, command_environment: dict[str, str]
) -> None:
    """run_limited.py is the case's own; the limit is between the start's disk test and the first shard."""
    command = [str(ROOT / "extract.py"), "model=tiny", "hardware=cpu", "store=store"]
    limited = [str(CASES / "EXT-12" / "run_limited.py"), "10000000", sys.executable, *command]
    done = subprocess.run(
        [sys.executable, *limited], cwd=tmp_path, env=command_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert re.search(r"error: cannot write .*store/shards/00000\.safetensors \(errno 27", done.stderr)
    assert "Traceback" not in done.stderr
    # the smaller shard after it may have been written meanwhile; if so, it is whole and indexed
    written = {file.name for file in (tmp_path / "store" / "shards").iterdir()}
    assert written <= {"00001.safetensors"}
    assert (tmp_path / "store" / "index.jsonl").read_text().count("\n") == len(written)
    done = warm_python.run(command, cwd=tmp_path, env=command_environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(StoreReader(tmp_path / "store", verify="full")) > 0


def _write(path: Path, go: Any, answers: Any) -> None:
    """What each of several workers does that were all told to write the same store."""
    torch.set_num_threads(1)
    ids, mask = list(range(25)), [1] * 25
    row = SimpleNamespace(
        row_id=row_id_of(ids, mask), conversation_id="c", source="s:1", split="train", input_ids=ids,
        loss_mask=mask,
    )  # fmt: skip
    manifest = Manifest(
        verifier=VerifierIdentity("Llama", "c", "w", 8, 6, 32), tokenizer_hash="t", template_hash="j",
        template_args_hash="a", layer_ids=(2, 4, 5), dtype="bfloat16", engine={"name": "test"},
    )  # fmt: skip
    go.wait(20)
    try:
        with StoreWriter(path, manifest, [row], 100) as writer:
            answers.put("writes")
            go.wait(20)  # all others have been turned away by now
            ones = torch.ones(25, 8, dtype=torch.bfloat16)
            for number, _ in writer.pending():
                writer.write_shard(number, [(row, ones.repeat(1, 3), ones, torch.tensor(ids))])
            writer.finish()
    except UserError as error:
        answers.put(str(error))
        go.wait(20)


def test_ext_13_of_four_workers_exactly_one_writes_and_readers_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    go, answers = context.Barrier(5), context.Queue()
    workers = [context.Process(target=_write, args=(tmp_path / "store", go, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    go.wait(20)
    said = [answers.get(timeout=20) for _ in workers]
    assert said.count("writes") == 1
    assert sum("another process is writing the store" in text for text in said) == 3
    with pytest.raises(UserError, match="not finished"):
        StoreReader(tmp_path / "store")
    go.wait(20)
    for worker in workers:
        worker.join(20)
    assert sorted(os.listdir(tmp_path)) == ["store"]
    assert os.listdir(tmp_path / "store" / "shards") == ["00000.safetensors"]
    assert len(StoreReader(tmp_path / "store", verify="full")) == 1


@pytest.mark.parametrize("name", ["draft_with_code.pt", "plain.pkl"])
def test_sec_01_the_import_runs_nothing_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = tmp_path / "old"
    source.mkdir()
    shutil.copy(CASES / "SEC-01" / name, source / "data_0.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IntegrityError, match=r"data_0\.pt is refused[\s\S]*nothing in it was run"):
        run(source, tmp_path / "store", "target_tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
