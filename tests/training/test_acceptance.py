"""Acceptance by decoding while training: it changes nothing, survives a resume, and can select and end a run."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DraftConfig, TrainerConfig
from eagle3lab.config.selection import AcceptanceConfig, EarlyStoppingConfig, SelectBy
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.evaluate.meter import DraftMeter, validation_prompts
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_state import load_weights
from eagle3lab.training.trainer import fit

NOISE = 0.05


@pytest.fixture(scope="module")
def meter(tiny: ModuleType, store: StoreReader, tmp_path_factory: pytest.TempPathFactory) -> DraftMeter:
    """Over a random verifier of the shapes that the tests' stores claim to be of."""
    facts = tiny.FACTS
    config = LlamaConfig(
        vocab_size=facts.vocab_size, hidden_size=facts.hidden_size, intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=facts.max_positions, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("verifier")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).float().save_pretrained(path)
    facts = replace(facts, path=path)
    cfg = DraftConfig(name="test", ttt_steps=tiny.TTT_STEPS)
    draft = build_draft(
        cfg, facts, tiny.edge_weights(), tiny.VOCABULARY, tiny.AUX_IDS, attention="sdpa", seed=0
    )
    return DraftMeter(
        HuggingFaceEngine(path, facts), draft.eval(), validation_prompts(store, 2, 100), 2, 8, frozenset(), ""
    )


def config(tiny: ModuleType, *, every: int | None = 2, **fields: Any) -> TrainerConfig:
    """12 updates in 3 epochs, validated and saved after every second one."""
    acceptance = AcceptanceConfig(every_updates=every, k=2)
    values = {"tokens_per_update": 2 * tiny.SEQ_LEN, "max_epochs": 3, "log_every_updates": 1} | fields
    return TrainerConfig(seq_len=tiny.SEQ_LEN, validate_every_updates=2, acceptance=acceptance, **values)


def run(tiny: ModuleType, store: StoreReader, path: Path, train: TrainerConfig, **more: Any) -> Any:
    module, data = tiny.build(store, train, noise=NOISE)
    return module, fit(module, data, hardware=tiny.hardware(), train=train, run_dir=path, **more)


def scripted(values: list[float]) -> Any:
    """A measurement that gives these acceptance lengths, one after the other; the untrained draft's first."""
    left = iter(values)

    def measure(weights: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...]]:
        return 100, (round(100 * (next(left) - 1)), 0)

    return measure


def rows(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as f:
        return [
            {k: v for k, v in row.items() if not k.startswith(("speed/", "val/real_"))}
            for row in csv.DictReader(f)
        ]


def state(path: Path) -> dict[str, Tensor]:
    checkpoint = torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)
    optimizer = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{i}.{name}": t for i, held in optimizer.items() for name, t in held.items()}
    return checkpoint["state_dict"] | moments


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.fixture(scope="module")
def whole(
    tiny: ModuleType, store: StoreReader, meter: DraftMeter, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A run that was never stopped, and measured."""
    path = tmp_path_factory.mktemp("whole")
    return path, run(tiny, store, path, config(tiny), measure_acceptance=meter.measure)[1]


def test_measuring_changes_no_weight_no_optimizer_state_and_no_random_number(
    tiny: ModuleType, store: StoreReader, meter: DraftMeter, tmp_path: Path
) -> None:
    left = []
    for name, every in (("with", 2), ("without", None)):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        train = config(tiny, every=every)
        run(tiny, store, tmp_path / name, train, measure_acceptance=meter.measure if every else None)
        left.append((random_states(), torch.rand(3).tolist()))
    assert left[0] == left[1]
    assert same(state(tmp_path / "with"), state(tmp_path / "without"))
    assert rows(tmp_path / "with") == rows(tmp_path / "without")


def test_it_is_measured_with_the_untrained_draft_every_so_many_updates_and_at_the_end(whole: Any) -> None:
    path, summary = whole
    with (path / "metrics.csv").open(newline="") as f:
        measured = {int(r["update"]): r for r in csv.DictReader(f) if r["val/real_acceptance_length"]}
    assert list(measured) == [0, 2, 4, 6, 8, 10, 12]
    for row in measured.values():
        steps = [float(row[f"val/real_acceptance_step{k}"]) for k in range(2)]
        assert float(row["val/real_acceptance_length"]) == pytest.approx(1 + sum(steps))
        assert row["val/loss"]
    assert "val/real_acceptance_length" in summary.best_validation


def test_the_weights_measured_are_those_that_are_validated(
    tiny: ModuleType, store: StoreReader, tmp_path: Path
) -> None:
    """The averaged ones, where a run has them."""
    seen: list[dict[str, Tensor]] = []

    def measure(weights: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...]]:
        seen.append({name: tensor.clone() for name, tensor in weights.items()})
        return 1, (0, 0)

    train = config(tiny, max_epochs=1)
    module, data = tiny.build(store, train, optim=tiny.optim(ema_decay=0.5))
    fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path, measure_acceptance=measure)
    raw = tiny.weights(module)
    load_weights(module.draft, tmp_path / "checkpoints" / "last.ckpt")
    assert same(seen[-1], tiny.weights(module))
    assert not same(seen[-1], raw)


@pytest.mark.parametrize("stopped_after", [3, 6])
def test_a_resumed_run_measures_and_selects_as_one_that_was_never_stopped(
    tiny: ModuleType, store: StoreReader, meter: DraftMeter, tmp_path: Path, whole: Any, stopped_after: int
) -> None:
    path, uninterrupted = whole
    train = config(tiny, save_every_updates=1)
    stop = (tiny.StopAt(stopped_after + 1),)
    with pytest.raises(tiny.Stop):
        run(tiny, store, tmp_path, train, measure_acceptance=meter.measure, loggers=stop)
    _, summary = run(tiny, store, tmp_path, train, measure_acceptance=meter.measure, resume=True)
    assert summary.resumed_from_update == stopped_after
    assert same(state(tmp_path), state(path))
    assert rows(tmp_path) == rows(path)
    assert summary.selection == uninterrupted.selection
    assert summary.best_validation == uninterrupted.best_validation


def test_real_acceptance_selects_and_its_checkpoint_says_so(
    tiny: ModuleType, store: StoreReader, tmp_path: Path
) -> None:
    train = config(tiny, select_by=SelectBy.real_acceptance)
    lengths = [1.0, 1.1, 1.4, 1.4, 1.3, 1.2, 1.1]
    module, summary = run(tiny, store, tmp_path, train, measure_acceptance=scripted(lengths))
    assert summary.selection["update"] == 4
    assert summary.selection["value"] == pytest.approx(1.4)
    assert summary.selection["untrained_value"] == 1.0
    assert summary.selection["better_than_untrained"] is True
    best = torch.load(summary.best_checkpoint, weights_only=True)
    assert best["eagle3lab_selection"]["select_by"] == "real_acceptance"
    assert best["eagle3lab_selection"]["value"] == pytest.approx(1.4)
    assert load_weights(module.draft, Path(summary.best_checkpoint)) == 4


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_ends_early_and_stays_ended_when_it_is_resumed(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, interrupted: bool
) -> None:
    stopping = EarlyStoppingConfig(patience=2, min_delta=0.05)
    train = config(tiny, select_by=SelectBy.real_acceptance, early_stopping=stopping, save_every_updates=1)
    lengths = [1.0, 1.3, 1.34, 1.31, 9.0]
    if interrupted:
        stop = (tiny.StopAt(6),)  # update 4 was the first without enough gain
        with pytest.raises(tiny.Stop):
            run(tiny, store, tmp_path, train, measure_acceptance=scripted(lengths), loggers=stop)
    measure = scripted(lengths[3:] if interrupted else lengths)
    _, summary = run(tiny, store, tmp_path, train, measure_acceptance=measure, resume=interrupted)
    assert (summary.updates, summary.selection["stopped_early"]) == (6, True)
    assert summary.selection["update"] == 4  # a small gain is not enough to go on, but it is one
    before = rows(tmp_path)
    _, again = run(tiny, store, tmp_path, train, measure_acceptance=scripted([]), resume=True)
    assert (again.updates, again.selection) == (6, summary.selection)
    assert rows(tmp_path) == before
    longer = replace(train, early_stopping=EarlyStoppingConfig())
    _, on = run(tiny, store, tmp_path, longer, measure_acceptance=scripted([1.5, 1.2, 1.2]), resume=True)
    assert (on.updates, on.selection["update"]) == (12, 8)


def test_a_draft_that_never_got_better_is_exported_and_the_summary_says_so(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = config(tiny, every=None, select_by=SelectBy.loss)
    _, summary = train_run(store, tmp_path, train, optim=tiny.optim(lr=0.0))
    assert summary.selection["better_than_untrained"] is False
    assert summary.selection["update"] == 2  # the first of equal ones
    assert summary.best_checkpoint is not None


def test_prompts_are_served_prompts_of_validation_rows_with_the_domains_in_turn(
    tiny: ModuleType, tmp_path: Path
) -> None:
    def row(number: int, source: str, start: int, length: int = 12, conversation: str | None = None) -> Any:
        made = tiny.make_row(length, "validation", number, start)
        return replace(made, source=source, conversation_id=conversation or made.conversation_id)

    rows = [
        *tiny.default_rows(2, 0),
        row(10, "a.jsonl:1", 4),
        row(11, "a.jsonl:1", 6, conversation="conversation10"),  # its second turn
        row(12, "a.jsonl:2", 5),
        row(13, "a.jsonl:3", 28, 30),  # too long
        row(14, "b.jsonl:1", 12),  # nothing supervised
        row(15, "b.jsonl:2", 7),
        row(16, "a.jsonl:4", 3),
    ]
    store = tiny.write_store(tmp_path / "store", rows)
    made = {r.conversation_id: r.input_ids for r in rows if r.conversation_id != "conversation10"}
    expected = [
        rows[2].input_ids[:4],
        made["conversation12"][:5],
        made["conversation15"][:7],
        made["conversation16"][:3],
    ]
    assert list(validation_prompts(store, 9, 20)) == expected
    assert list(validation_prompts(store, 2, 20)) == expected[:2]


def test_a_failed_measurement_ends_the_run_with_its_own_error(
    tiny: ModuleType, store: StoreReader, tmp_path: Path
) -> None:
    def measure(weights: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...]]:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run(tiny, store, tmp_path, config(tiny), measure_acceptance=measure)


def test_what_needs_validation_rows_is_refused_without_them(tiny: ModuleType, tmp_path: Path) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows(4, 0))
    train = config(tiny, early_stopping=EarlyStoppingConfig(patience=1))
    with pytest.raises(UserError) as caught:
        run(tiny, store, tmp_path, train, measure_acceptance=scripted([]))
    text = caught.value.render()
    assert "train.early_stopping.patience=null" in text
    assert "train.acceptance.every_updates=null" in text
