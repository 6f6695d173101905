"""Interrupted and resumed is uninterrupted, bit by bit on CPU; a checkpoint that does not belong is refused."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import OptimKind, Schedule, TrainerConfig
from eagle3lab.config.selection import SelectBy
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_files import find_resume_point, read_position
from eagle3lab.training.checkpoint_state import load_weights

NOISE = 0.05


def config(tiny: ModuleType, **fields: Any) -> TrainerConfig:
    # 8 packs, so 4 updates per epoch
    values = {"tokens_per_update": 2 * tiny.SEQ_LEN, "max_epochs": 3, "log_every_updates": 1} | fields
    return TrainerConfig(seq_len=tiny.SEQ_LEN, **values)


def rows_without_speed(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as f:
        return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in csv.DictReader(f)]


def optimizer_state(path: Path) -> list[torch.Tensor]:
    checkpoint = torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"].values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    schedule = tiny.optim(schedule=Schedule.cosine, lr_warmup_updates=3)
    module, summary = train_run(store, path, config(tiny, save_every_updates=1), noise=NOISE, optim=schedule)
    return path, tiny.weights(module), summary, schedule


@pytest.mark.parametrize("stopped_after", [1, 2, 4, 7, 8, 11])
def test_a_resumed_run_equals_the_uninterrupted_one(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, whole: Any, stopped_after: int
) -> None:
    path, wanted, uninterrupted, schedule = whole
    train = config(tiny, save_every_updates=1)
    with pytest.raises(tiny.Stop):
        train_run(
            store, tmp_path, train, noise=NOISE, optim=schedule, loggers=(tiny.StopAt(stopped_after + 1),)
        )
    assert read_position(tmp_path / "checkpoints" / "last.ckpt")["num_updates"] == stopped_after
    module, summary = train_run(store, tmp_path, train, noise=NOISE, optim=schedule, resume=True)
    assert summary.resumed_from_update == stopped_after
    assert same(tiny.weights(module).values(), wanted.values())
    assert same(optimizer_state(tmp_path), optimizer_state(path))
    assert rows_without_speed(tmp_path) == rows_without_speed(path)
    assert summary.best_validation == uninterrupted.best_validation


def test_work_after_the_last_save_is_done_again_and_logged_once(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, whole: Any
) -> None:
    path, wanted, _, schedule = whole
    train = config(tiny, save_every_updates=3)
    with pytest.raises(tiny.Stop):
        train_run(store, tmp_path, train, noise=NOISE, optim=schedule, loggers=(tiny.StopAt(6),))
    assert [row["update"] for row in rows_without_speed(tmp_path)][-1] == "6"
    module, summary = train_run(store, tmp_path, train, noise=NOISE, optim=schedule, resume=True)
    assert summary.resumed_from_update == 4  # saved with the first epoch's validation
    assert same(tiny.weights(module).values(), wanted.values())
    assert rows_without_speed(tmp_path) == rows_without_speed(path)


def test_without_validation_rows_an_epochs_end_is_a_place_to_resume_too(
    tiny: ModuleType, train_run: Any, tmp_path: Path
) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows(12, 0))
    train = config(tiny, max_epochs=2)
    whole, summary = train_run(store, tmp_path / "a", train, noise=NOISE)
    assert summary.best_checkpoint is None
    assert summary.last_validation == {}
    with pytest.raises(tiny.Stop):
        train_run(store, tmp_path / "b", train, noise=NOISE, loggers=(tiny.StopAt(6),))
    module, resumed = train_run(store, tmp_path / "b", train, noise=NOISE, resume=True)
    assert resumed.resumed_from_update == 4
    assert same(tiny.weights(module).values(), tiny.weights(whole).values())


def test_a_run_split_into_micro_batches_resumes_at_an_update(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    # 8 packs in updates of 3: the last update of every epoch is incomplete
    train = config(tiny, tokens_per_update=3 * tiny.SEQ_LEN, max_epochs=2, save_every_updates=1)
    whole, _ = train_run(store, tmp_path / "a", train, noise=NOISE)
    for stop in (2, 3, 4):
        with pytest.raises(tiny.Stop):
            train_run(store, tmp_path / str(stop), train, noise=NOISE, loggers=(tiny.StopAt(stop),))
        module, _ = train_run(store, tmp_path / str(stop), train, noise=NOISE, resume=True)
        assert same(tiny.weights(module).values(), tiny.weights(whole).values())


def test_a_longer_budget_goes_on_from_the_end_with_the_new_schedule(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = config(tiny, max_epochs=None, max_updates=6)
    longer = replace(train, max_updates=9)
    schedule = tiny.optim(schedule=Schedule.linear, lr_warmup_updates=2)
    train_run(store, tmp_path, train, optim=schedule)
    module, summary = train_run(store, tmp_path, longer, optim=schedule, resume=True)
    assert (summary.resumed_from_update, summary.updates) == (6, 9)
    logged = [
        float(row["train/learning_rate"])
        for row in rows_without_speed(tmp_path)
        if row["train/learning_rate"]
    ]
    assert logged[6:] == pytest.approx([module.learning_rate(u) for u in (6, 7, 8)])
    assert module.learning_rate(6) == pytest.approx(1e-2 * 3 / 7)


def test_a_complete_run_resumed_does_nothing_and_keeps_its_weights(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = config(tiny, max_epochs=1)
    first, _ = train_run(store, tmp_path, train)
    before = rows_without_speed(tmp_path)
    again, summary = train_run(store, tmp_path, train, resume=True)
    assert summary.updates == summary.resumed_from_update == 4
    assert same(tiny.weights(again).values(), tiny.weights(first).values())
    assert rows_without_speed(tmp_path) == before


def test_resuming_without_a_checkpoint_says_which_file_is_missing(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"last\.ckpt"):
        train_run(store, tmp_path, config(tiny), resume=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 5}, "train.seed"),
        ({"tokens_per_update": 32}, "packs_per_update"),
        ({"seq_len": 64}, "order_of_rows"),
    ],
)
def test_other_data_order_or_update_size_is_refused(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    train = config(tiny, max_epochs=1)
    train_run(store, tmp_path, train)
    other = replace(train, **fields)
    if "seq_len" in fields:
        other = replace(other, tokens_per_update=2 * fields["seq_len"])
    with pytest.raises(UserError, match=message):
        train_run(store, tmp_path, other, resume=True)


def test_a_budget_that_ends_before_the_checkpoint_is_refused(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = config(tiny, max_epochs=2, max_updates=5)
    train_run(store, tmp_path, train)
    for shorter in (replace(train, max_updates=4), replace(train, max_epochs=1)):
        with pytest.raises(UserError, match="updates made until it: 5; expected at most 4"):
            train_run(store, tmp_path, shorter, resume=True)


@pytest.mark.parametrize("kind", list(OptimKind))
def test_a_resumed_run_has_its_own_optimizer_settings_and_the_states_of_before(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, kind: OptimKind
) -> None:
    train = config(tiny, max_updates=2)
    train_run(store, tmp_path, train, optim=tiny.optim(kind=kind))
    other = {"weight_decay": 0.25, "betas": [0.5, 0.75], "eps": 1e-4, "muon_momentum": 0.5}
    module, _ = train_run(
        store, tmp_path, replace(train, max_updates=3), optim=tiny.optim(kind=kind, **other), resume=True
    )
    groups = [group for o in module.trainer.optimizers for group in o.param_groups]
    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert {tuple(g["betas"]) for g in groups if "betas" in g} == {(0.5, 0.75)}
    assert {g["momentum"] for g in groups if "momentum" in g} == ({0.5} if kind is OptimKind.muon else set())
    assert {float(step) for step in optimizer_steps(tmp_path)} == {3.0}


def optimizer_steps(path: Path) -> list[torch.Tensor]:
    checkpoint = torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)
    states = [s for optimizer in checkpoint["optimizer_states"] for s in optimizer["state"].values()]
    return [state["step"] for state in states if "step" in state]


def test_one_bit_of_the_archives_own_directory_is_damage_too(whole: Any, tmp_path: Path) -> None:
    content = bytearray((whole[0] / "checkpoints" / "last.ckpt").read_bytes())
    (tmp_path / "previous.ckpt").write_bytes(content)
    content[-64] ^= 1  # in the zip64 end record, of which Python's zipfile does not look at all
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(IntegrityError, match="is damaged"):
        read_position(tmp_path / "last.ckpt")
    assert find_resume_point(tmp_path).path.name == "previous.ckpt"


@pytest.mark.parametrize("best", ["ahead", "missing"])
def test_a_best_whose_weights_are_not_there_is_chosen_anew(
    tiny: ModuleType,
    store: StoreReader,
    train_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    best: str,
) -> None:
    train = config(tiny, max_updates=3, validate_every_updates=1, select_by=SelectBy.loss)
    train_run(store, tmp_path, train)
    directory = tmp_path / "checkpoints"
    assert read_position(directory / "best.ckpt")["num_updates"] == 3
    if best == "ahead":  # as a kill in the middle of a save leaves it
        (directory / "previous.ckpt").replace(directory / "last.ckpt")
        train = replace(train, max_updates=2)
    else:
        (directory / "best.ckpt").unlink()
    _, summary = train_run(store, tmp_path, train, resume=True)
    assert summary.best_checkpoint is None
    assert summary.selection["update"] is None
    assert "chosen anew from here on" in capsys.readouterr().out
    _, summary = train_run(store, tmp_path, replace(train, max_updates=4), resume=True)
    assert read_position(Path(summary.best_checkpoint))["num_updates"] == summary.selection["update"]


def test_what_was_passed_over_is_not_exported(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = config(tiny, max_updates=3, save_every_updates=1)
    train_run(store, tmp_path, train)
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"damaged")
    (tmp_path / "checkpoints" / "best.ckpt").unlink()
    _, summary = train_run(store, tmp_path, replace(train, max_updates=2), resume=True)
    assert Path(summary.last_checkpoint).name == "previous.ckpt"


def test_a_checkpoint_is_plain_data_without_the_verifiers_tensors(tiny: ModuleType, whole: Any) -> None:
    path = whole[0] / "checkpoints"
    assert sorted(p.name for p in path.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    checkpoint = torch.load(path / "last.ckpt", weights_only=True)
    names = set(checkpoint["state_dict"])
    assert {"draft.t2d", "draft.d2t", "draft.fc.weight"} <= names
    assert not [
        n for n in names if "embed_tokens" in n or "lm_head" in n or "verifier" in n or "_orig_mod" in n
    ]
    assert {t.dtype for t in optimizer_state(whole[0])} == {torch.float32}


def test_best_weights_are_those_of_the_best_validation(
    tiny: ModuleType, store: StoreReader, whole: Any
) -> None:
    path, wanted, summary, schedule = whole
    module, _ = tiny.build(store, config(tiny), optim=schedule)
    assert load_weights(module.draft, path / "checkpoints" / "last.ckpt") == 12
    assert same(tiny.weights(module).values(), wanted.values())
    assert load_weights(module.draft, Path(summary.best_checkpoint)) == summary.best_validation["update"]


def test_another_vocabulary_is_refused(tiny: ModuleType, store: StoreReader, whole: Any) -> None:
    module, _ = tiny.build(store, config(tiny))
    other = DraftVocabulary.from_ids(range(1, tiny.VOCAB, 2), tiny.VOCAB)
    module.draft.t2d.copy_(other.t2d)
    module.draft.d2t.copy_(other.d2t)
    with pytest.raises(IntegrityError, match="draft vocabulary differs"):
        load_weights(module.draft, whole[0] / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"not a checkpoint"])
def test_a_torn_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    torn = tmp_path / "last.ckpt"
    torn.write_bytes(content)
    with pytest.raises(UserError, match=r"last\.ckpt"):
        read_position(torn)
