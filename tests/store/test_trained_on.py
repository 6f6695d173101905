"""The keys of what a draft of a store has seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3lab.config.errors import IntegrityError
from eagle3lab.store.manifest import Manifest, _seal
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.trained_on import (
    TRAINED_ON_FILE,
    TrainedOn,
    prompt_key,
    read_trained_on,
    text_key,
    trained_on,
    write_trained_on,
)
from eagle3lab.store.writer import StoreWriter


@pytest.mark.parametrize(
    "other",
    [
        "  what IS\tthis?\r\n",
        "What\u00a0is \u3000this?",
        "\uff37hat is thi\u017f?",
        "what\u2003is this\uff1f",
    ],
)
def test_a_text_keeps_its_key_in_another_case_spacing_and_form(other: str) -> None:
    assert text_key(other) == text_key("What is this?")


@pytest.mark.parametrize("other", ["What is this", "What is that?", "Whatis this?", ""])
def test_another_text_has_another_key(other: str) -> None:
    assert text_key(other) != text_key("What is this?")


@pytest.mark.parametrize("text", ["\u1e9e \ufb03 \u0130", "\u03aa\u0301 \u1fb3", "\u212b \ufdfa \u00c9"])
def test_a_text_and_its_folded_form_have_the_same_key(text: str) -> None:
    assert text_key(text) == text_key(text.casefold()) == text_key(text.casefold().casefold())


def test_keys_are_the_first_bytes_of_known_hashes() -> None:
    assert text_key("A  b") == int.from_bytes(hashlib.sha256(b"a b").digest()[:8], "big")
    ids = np.array([3, 1, 2], dtype="<i8").tobytes()
    assert prompt_key([3, 1, 2]) == int.from_bytes(hashlib.sha256(ids).digest()[:8], "big")


def test_training_rows_are_there_up_to_their_first_supervised_token_and_validation_rows_are_not(
    fake: SimpleNamespace,
) -> None:
    rows = fake.rows(40)
    keys = trained_on(rows, [5, 3, 5])
    train = [row for row in rows if row.split == "train" and 1 in row.loss_mask]
    for row in rows:
        cut = [*row.loss_mask, 1].index(1)
        known = any(row.input_ids[:cut] == t.input_ids[: t.loss_mask.index(1)] for t in train)
        assert keys.has_prompt(list(row.input_ids[:cut])) == known
        assert not keys.has_prompt([*row.input_ids[:cut], 0, 0])
    assert not all(keys.has_prompt(row.input_ids[: [*row.loss_mask, 1].index(1)]) for row in rows)
    assert keys.user_turns is not None
    assert keys.user_turns.tolist() == [3, 5]


def test_what_is_written_is_read_and_gives_the_same_bytes(tmp_path: Path, fake: SimpleNamespace) -> None:
    keys = trained_on(fake.rows(), [text_key("one"), text_key("two")])
    for name in ("a", "b"):
        write_trained_on(tmp_path / name, keys)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    read = read_trained_on(tmp_path / "a")
    assert np.array_equal(read.served_prompts, keys.served_prompts)
    assert (read.has_user_turn("ONE"), read.has_user_turn("three")) == (True, False)
    assert not TrainedOn(read.served_prompts, None).has_user_turn("one")


def test_no_training_rows_are_no_keys(tmp_path: Path) -> None:
    write_trained_on(tmp_path / "keys", trained_on([], []))
    assert not read_trained_on(tmp_path / "keys").has_user_turn("")


@pytest.mark.parametrize("damage", ["cut", "unsorted", "wrong type", "nothing", "more"])
def test_a_damaged_file_is_an_integrity_error(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    good = {"served_prompts": np.array([1, 2], dtype=np.uint64)}
    content = {
        "cut": good,
        "unsorted": {"served_prompts": np.array([2, 1], dtype=np.uint64)},
        "wrong type": {"served_prompts": np.array([1, 2], dtype=np.int64)},
        "nothing": {"user_turns": good["served_prompts"]},
        "more": good | {"weights": good["served_prompts"]},
    }
    save_file(content[damage], file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="keys"):
        read_trained_on(file)


def test_a_store_holds_its_keys_and_a_writer_makes_damaged_ones_again(
    store: Path, fake: SimpleNamespace, tmp_path: Path
) -> None:
    file = store / TRAINED_ON_FILE
    good = file.read_bytes()
    assert set(load_file(file)) == {"served_prompts"}  # the fake rows have no texts
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=TRAINED_ON_FILE):
        StoreReader(store)
    with StoreWriter(store, fake.manifest(), fake.rows(), 40) as writer:
        assert [number for number, _ in writer.pending()] == []
        assert any(f"{TRAINED_ON_FILE} again" in note for note in writer.notes)
        writer.finish()
    assert file.read_bytes() == good
    assert len(StoreReader(store)) == 12


def test_a_store_of_an_earlier_version_without_keys_is_read(store: Path) -> None:
    (store / TRAINED_ON_FILE).unlink()
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["checksums"][TRAINED_ON_FILE], manifest["sha256"]
    (store / "manifest.json").write_text(json.dumps({**manifest, "sha256": _seal(manifest)}))
    reader = StoreReader(store, verify="full")
    assert len(reader) == 12
    assert isinstance(reader.manifest, Manifest)
