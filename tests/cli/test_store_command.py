"""`python -m eagle3lab store ...` as a user runs it: parts by multirun, merge, inspect, verify, import."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle3lab.__main__ import main
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.locate import asset_path

ROOT = Path(__file__).resolve().parents[2]
EXTRACT = ("model=tiny", "hardware=cpu", "extract.shard_tokens=2000")


@pytest.fixture(scope="module")
def store(run_command: Callable, workspace: Path) -> Path:
    """The tiny verifier's store, written in one go."""
    run_command("extract.py", *EXTRACT, "store=one_go")
    return workspace / "one_go"


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


def command(*words: object, expect: int = 0) -> Done:
    """`python -m eagle3lab store WORDS`, in this process: what it prints and the code it would exit with."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["store", *map(str, words)])
    assert code == expect, out.getvalue() + err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def tree(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and "logs" not in path.parts
    }


def test_the_page_on_nodes_gives_the_commands_that_make_the_bytes_of_one_run(
    run_command: Callable, workspace: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    page = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("    python")]
    (extract,) = [words[2:] for words in lines if words[1] == "extract.py"]
    stores = [words[4:] for words in lines if words[1:4] == ["-m", "eagle3lab", "store"]]
    assert [words[0] for words in stores] == ["merge", "verify"]
    done = run_command("extract.py", *extract)
    assert done.stdout.count("python -m eagle3lab store merge") == 3
    printed = [command(*words).stdout for words in stores]
    assert "joined 3 parts" in printed[0]
    assert tree(workspace / "joined") == tree(store)
    shutil.rmtree(workspace / "joined.part2of3")
    refused = command("merge", "again", "joined.part0of3", "joined.part1of3", expect=2).stderr
    assert refused.startswith("error: parts of 3 (missing: [2])")
    assert "extract.part=2 extract.num_parts=3, which writes again.part2of3" in refused
    assert "there are no parts of this store" in command("merge", "nothing", expect=2).stderr


def test_a_part_that_does_not_exist_is_refused_before_anything_runs(run_command: Callable) -> None:
    done = run_command("extract.py", *EXTRACT, "extract.num_parts=3", "extract.part=3", expect=2)
    assert "extract.part of extract.num_parts=3: 3; expected a number from 0 to 2" in done.stderr


def test_inspect_says_what_is_inside_without_torch(store: Path) -> None:
    text = command("inspect", store).stdout
    reader = StoreReader(store)
    manifest = reader.manifest
    assert f"{manifest.num_tokens:,}, {manifest.num_supervised:,} supervised" in text
    assert f"layers {list(manifest.layer_ids)} (hf_hidden_states)" in text
    assert "(complete, format 2)" in text
    histogram = [line.split() for line in text.splitlines() if line.startswith("  <=")]
    assert sum(int(words[2]) for words in histogram) == len(reader)
    found = json.loads(command("inspect", store, "--json").stdout)
    assert found["num_rows"]["train"] == len(reader.indices("train"))
    assert found["manifest"]["verifier"]["name"] == "tiny"
    code = "import sys; from eagle3lab.__main__ import main; main(['store', 'inspect', sys.argv[1]]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(store)], cwd=ROOT, check=False).returncode == 0


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(store: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "eagle3lab", "store", "inspect", str(store)]
    done = subprocess.run(words, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_store_of_supervised_last_states_says_so_and_verifies(
    run_command: Callable, workspace: Path
) -> None:
    run_command("extract.py", *EXTRACT, "store=supervised", "extract.last_state=supervised")
    path = workspace / "supervised"
    reader = StoreReader(path)
    num_last = sum(row.num_last_states for row in reader.rows)
    assert reader.manifest.num_supervised <= num_last < reader.manifest.num_tokens
    text = command("inspect", path).stdout
    assert "(complete, format 3)" in text
    assert f"the last one only where it can be a target: {num_last:,} tokens" in text
    assert json.loads(command("inspect", path, "--json").stdout)["num_last_states"] == num_last
    text = command("verify", path, "--model-path", asset_path("tiny")).stdout
    assert f"last states: {num_last:,} of {reader.manifest.num_tokens:,} tokens" in text
    assert "alignment self-test passed" in text


def test_inspect_decodes_a_sample_and_warns_of_another_tokenizer(store: Path, tmp_path: Path) -> None:
    text = command("inspect", store, "--model-path", asset_path("tiny")).stdout
    assert "[[" in text.partition("--- ")[2]
    assert "WARNING" not in text
    other = tmp_path / "other"
    shutil.copytree(asset_path("tiny"), other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    assert "WARNING: this tokenizer is not" in command("inspect", store, "--model-path", other).stdout


def test_verify_proves_bytes_rows_counts_and_alignment(store: Path) -> None:
    text = command("verify", store, "--model-path", asset_path("tiny")).stdout
    assert "have the bytes that were written" in text
    assert "alignment self-test passed" in text


def test_verify_refuses_a_changed_byte_and_names_the_shard(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shard = copy / "shards" / "00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert f"error: {shard}: sha256" in command("verify", copy, expect=2).stderr
    missing = command("verify", tmp_path / "nothing", expect=2)
    assert "there is no hidden-state store" in missing.stderr


def test_import_makes_a_store_that_verifies(store: Path, tmp_path: Path) -> None:
    reader, old = StoreReader(store), tmp_path / "old"
    old.mkdir()
    for i in range(3):
        row = reader.read(i)
        slots = [*row["aux_hidden_states"].chunk(3, dim=1), row["verifier_last_hidden_states"]]
        data = {"hidden_states": slots, "input_ids": row["input_ids"], "loss_mask": row["loss_mask"].long()}
        torch.save(data, old / f"data_{i}.pt")
    tiny, ids = asset_path("tiny"), reader.manifest.layer_ids
    words = ("import", old, tmp_path / "new", "--model-path", tiny, "--layer-ids", *ids)
    assert "imported 3 rows" in command(*words).stdout
    assert "passed" in command("verify", tmp_path / "new", "--model-path", tiny).stdout
    refused = command(*words[:2], tmp_path / "no", *words[3:5], "--layer-ids", *ids[::-1], expect=2)
    assert "increasing" in refused.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "S", "--rows", "0"),
        ("import", "F", "S", "--model-path", "V", "--shard-tokens", "0"),
        ("import", "F", "S", "--model-path", "V", "--validation-share", "1"),
        ("verify", "S", "--device", "tpu"),
        ("verify", "S", "--device", "cuda"),
    ],
)
def test_impossible_values_are_refused_by_option(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="2"):
        main(["store", *words])
    assert f"argument {words[-2]}: {words[-1]} is not" in said.getvalue()
