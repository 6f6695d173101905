"""200 wrong stores against the reader: none is accepted silently, none ends in a traceback."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.store.manifest import Manifest, check_identity, check_resumable
from eagle3lab.store.reader import StoreReader

_spec = importlib.util.spec_from_file_location("store_mutations", Path(__file__).with_name("mutations.py"))
assert _spec is not None
assert _spec.loader is not None
_mutations = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_mutations)
MUTATIONS = _mutations.MUTATIONS

NUM_INPUTS = 200
OTHERS = (
    {"tokenizer_hash": "other"},
    {"template_hash": "other"},
    {"template_args_hash": "other"},
    {"layer_ids": (1, 4, 5)},
    {"weight_fingerprint": "other"},
    {"config_hash": "other"},
    {"num_layers": 9},
    {"last_state_rows": "supervised"},
)
KINDS_OF_STORE = {  # by the name of its directory
    "bfloat16": {"dtype": "bfloat16"},
    "float8_e4m3": {"dtype": "float8_e4m3"},
    "supervised": {"dtype": "bfloat16", "last_state_rows": "supervised"},
    "supervised_fp8": {"dtype": "float8_e4m3", "last_state_rows": "supervised"},
}


def verdict(path: Path, wanted: Manifest) -> str:
    """The first guard that refuses the store, in the order in which train.py and extract.py meet them."""
    try:
        reader = StoreReader(path)
    except UserError:
        return "refused when opened"
    try:
        for i in range(len(reader)):
            reader.read(i)
        reader.token_counts()
    except UserError:
        return "refused when read"
    try:
        check_identity(reader.manifest, wanted.verifier, wanted.layer_ids)
        check_resumable(path, reader.manifest, wanted)
    except UserError:
        return "refused as the store of something else"
    try:
        StoreReader(path, verify="full")
    except UserError:
        return "refused by the checksums (verify)"
    return "accepted"


def test_no_wrong_store_is_accepted(
    tmp_path: Path, fake: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    wanted = {}
    for of_store, fields in KINDS_OF_STORE.items():
        wanted[of_store] = fake.write(tmp_path / of_store, fake.rows(), fake.manifest(**fields))
        assert verdict(tmp_path / of_store, wanted[of_store]) == "accepted"
    counts: Counter[str] = Counter()
    by_kind: dict[str, set[str]] = {}
    kinds = [*MUTATIONS.items()]
    path = tmp_path / "mutated"
    for number in range(NUM_INPUTS):
        rng = random.Random(number)
        of_store = [*KINDS_OF_STORE][number // len(kinds) % len(KINDS_OF_STORE)]
        name, mutate = kinds[number % len(kinds)]
        shutil.copytree(tmp_path / of_store, path)
        mutate(path, rng)
        assert fake.tree(path) != fake.tree(tmp_path / of_store), (number, name)
        found = verdict(path, wanted[of_store])
        counts[found] += 1
        by_kind.setdefault(found, set()).add(name)
        assert found != "accepted", (number, name, of_store)
        shutil.rmtree(path)
    with capsys.disabled():
        print(f"\n{NUM_INPUTS} mutated stores, {len(kinds)} kinds:")
        for found, count in counts.most_common():
            print(f"  {count:>4} {found}: {', '.join(sorted(by_kind[found]))}")


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_a_sound_store_of_something_else_is_refused(
    tmp_path: Path, fake: SimpleNamespace, change: dict
) -> None:
    wanted = fake.write(tmp_path / "wanted", fake.rows(), fake.manifest())
    fake.write(tmp_path / "other", fake.rows(), fake.manifest(**change))
    assert verdict(tmp_path / "other", wanted) == "refused as the store of something else"


def test_the_same_rows_in_another_order_are_another_store(tmp_path: Path, fake: SimpleNamespace) -> None:
    wanted = fake.write(tmp_path / "wanted", fake.rows(), fake.manifest())
    fake.write(tmp_path / "other", fake.rows()[::-1], fake.manifest())
    assert verdict(tmp_path / "other", replace(wanted)) == "refused as the store of something else"
