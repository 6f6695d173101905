"""A share of the conversations: nested, whole, and near its size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lab.data import Eagle3SampleFileDataset
from eagle3lab.data.share import in_share
from eagle3lab.store.reader import StoreReader

NAMES = [f"conversation{i}" for i in range(4000)]


def test_every_share_is_part_of_every_larger_one_and_near_its_size() -> None:
    before: set[str] = set()
    for share in (0.01, 0.1, 0.25, 0.5, 0.9, 1.0):
        chosen = {name for name in NAMES if in_share(name, share)}
        assert before <= chosen
        # four standard deviations of a binomial
        assert abs(len(chosen) - share * len(NAMES)) <= 4 * (share * (1 - share) * len(NAMES)) ** 0.5
        before = chosen
    assert before == set(NAMES)


def test_a_data_set_has_the_rows_of_its_share_in_store_order(store: Path) -> None:
    reader = StoreReader(store)
    for share in (0.3, 0.7, 1.0):
        data = Eagle3SampleFileDataset(reader, split="train", data_share=share)
        kept = [i for i in reader.indices("train") if in_share(reader.rows[i].conversation_id, share)]
        assert data.store_rows() == kept
        assert data.lengths == [reader.rows[i].length - 1 for i in kept]
        for item, row in enumerate(kept):
            assert data[item]["input_ids"].tolist() == reader.read_tokens(row)[0].tolist()[1:]
    assert len(Eagle3SampleFileDataset(reader, split="train", data_share=0.3)) < len(reader.indices("train"))


def test_older_files_name_no_conversations(tmp_path: Path, make: SimpleNamespace) -> None:
    make.v1(tmp_path / "data", make.samples())
    with pytest.raises(ValueError, match="no conversations"):
        Eagle3SampleFileDataset(tmp_path / "data", data_share=0.5)
