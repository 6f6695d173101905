"""The training step against speculators' own, against hand-written sums, and its edges."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3lab.config.schema import OptimConfig, Schedule, TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.store.reader import StoreReader
from eagle3lab.training import module as training_module
from eagle3lab.training.noise_seed import pack_seed


def full_pack_store(tiny: ModuleType, path: Path) -> StoreReader:
    """One row that fills one pack; its first positions are not supervised, as in every real row."""
    return tiny.write_store(path, [tiny.make_row(tiny.SEQ_LEN + 1, "train", 1, supervised_from=9)])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_loss_and_gradients_of_a_full_pack_are_speculators_own(
    tiny: ModuleType, tmp_path: Path, train_run: Any, gradients: list[dict[str, Tensor]]
) -> None:
    from speculators.losses import resolve_loss_config

    store = full_pack_store(tiny, tmp_path / "store")
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, log_every_updates=1)
    _, summary = train_run(store, tmp_path / "run", train)

    reference, data = tiny.build(store, train)
    batch = create_collate_fn(tiny.SEQ_LEN)([data.train_data[0]])
    inputs = {k: v for k, v in batch.items() if k not in ("lengths", "row_index")}
    _, loss, _ = reference.draft(
        **inputs, ttt_steps=3, ttt_step_loss_decay=0.8, loss_config=resolve_loss_config("kl_div", "eager")
    )
    loss.backward()

    assert summary.last["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    wanted = {n: p.grad for n, p in reference.draft.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients[0].keys()
    assert max(relative(gradients[0][n], wanted[n]) for n in wanted) < 1e-5


def union_gradients(
    tiny: ModuleType, store: StoreReader, train: TrainerConfig, update: int
) -> tuple[float, dict[str, Tensor]]:
    """The update's loss and gradients by hand: sums over all its rows, one row at a time, divided once."""
    from speculators.losses import resolve_loss_config

    module, data = tiny.build(store, train)
    rows = module.plan.update(update).rows
    sums = [torch.zeros(()) for _ in range(3)]
    counts = [0, 0, 0]
    kl = resolve_loss_config("kl_div", "eager")["kl_div"][0]
    for row in rows:
        sample = data.train_data[row]
        length = int(sample["lengths"])
        batch = create_collate_fn(length)([sample])
        losses: list[Tensor] = []

        def keep(logits: Tensor, targets: Tensor, losses: list[Tensor] = losses) -> Tensor:
            losses.append(kl(logits, targets)[0])
            return losses[-1][None]

        inputs = {k: v for k, v in batch.items() if k not in ("lengths", "row_index")}
        module.draft(**inputs, ttt_steps=3, loss_config={"kept": (keep, 1.0)})
        mask = sample["loss_mask"]
        for k in range(3):
            sums[k] = sums[k] + losses[k][mask[k:]].sum()
            counts[k] += int(mask[k:].sum())
    loss = sum(0.8**k * sums[k] / counts[k] for k in range(3))
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in module.draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_an_updates_loss_is_over_all_its_tokens_however_it_is_cut(
    tiny: ModuleType,
    store: StoreReader,
    tmp_path: Path,
    train_run: Any,
    gradients: list[dict[str, Tensor]],
    micro_batches: int,
) -> None:
    train = TrainerConfig(
        seq_len=tiny.SEQ_LEN,
        tokens_per_update=micro_batches * tiny.SEQ_LEN,
        max_updates=1,
        log_every_updates=1,
    )
    _, summary = train_run(store, tmp_path, train)
    loss, wanted = union_gradients(tiny, store, train, 0)
    assert summary.last["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert max(relative(gradients[0][n], wanted[n]) for n in wanted) < 1e-5


def test_an_epochs_incomplete_last_update_divides_by_its_own_tokens(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any, gradients: list[dict[str, Tensor]]
) -> None:
    # a rate of 0 keeps the weights, so the last update can be made by hand from the first ones
    still = OptimConfig(lr=1e-3, schedule=Schedule.linear, lr_warmup_updates=10**6)
    train = TrainerConfig(
        seq_len=tiny.SEQ_LEN, tokens_per_update=3 * tiny.SEQ_LEN, max_epochs=2, log_every_updates=1
    )
    module, _ = train_run(store, tmp_path, train, optim=still)
    last = next(u for u in range(module.plan.num_updates) if module.plan.ends_epoch(u))
    assert module.plan.update(last).num_micro_batches < 3
    _, wanted = union_gradients(tiny, store, train, last)
    # rates up to 1e-9 * update: the weights have moved by less than fp32 shows
    assert max(relative(gradients[last][n], wanted[n]) for n in wanted) < 1e-4
    assert module.plan.update(last + 1).epoch == 1  # and the next epoch begins with a whole update
    assert len(gradients) == module.plan.num_updates


def test_an_update_without_supervised_tokens_is_loss_zero_and_moves_nothing(
    tiny: ModuleType, tmp_path: Path, train_run: Any
) -> None:
    rows = [tiny.make_row(30, "train", i, supervised_from=30) for i in range(2)]
    store = tiny.write_store(tmp_path / "store", rows)
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, log_every_updates=1)
    module, summary = train_run(store, tmp_path / "run", train)
    fresh, _ = tiny.build(store, train)
    assert summary.last["train/loss"] == 0.0
    assert all(
        torch.equal(a, b)
        for a, b in zip(tiny.weights(module).values(), tiny.weights(fresh).values(), strict=True)
    )


def test_a_row_without_supervised_tokens_changes_nothing_for_the_others(
    tiny: ModuleType, tmp_path: Path, train_run: Any, gradients: list[dict[str, Tensor]]
) -> None:
    empty, full = (
        tiny.make_row(20, "train", 1, supervised_from=20),
        tiny.make_row(20, "train", 2, supervised_from=5),
    )
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, tokens_per_update=2 * tiny.SEQ_LEN)
    train_run(tiny.write_store(tmp_path / "both", [full, empty]), tmp_path / "a", train)
    train_run(tiny.write_store(tmp_path / "one", [full]), tmp_path / "b", train)
    both, one = gradients
    assert max(relative(both[n], one[n]) for n in one) < 1e-6


def test_noise_reaches_the_aux_states_of_training_only(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, dict[str, Tensor]]] = []
    original = training_module.ttt_forward

    def spy(model: nn.Module, batch: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append((model.training, batch))
        return original(model, batch, *args, **kwargs)

    monkeypatch.setattr(training_module, "ttt_forward", spy)
    train = TrainerConfig(seq_len=tiny.SEQ_LEN)
    module, _ = train_run(store, tmp_path, train, noise=0.05)
    _, data = tiny.build(store, train)
    collate = create_collate_fn(tiny.SEQ_LEN)
    modes = set()
    for training, batch in seen:
        source = data.train_data if training else data.validation_data
        clean = collate([source[i] for i in batch["row_index"].tolist()])
        difference = (batch["hidden_states"] - clean["hidden_states"]).abs().max()
        modes.add(training)
        assert 0.04 < difference <= 0.0501 if training else difference == 0
        assert torch.equal(batch["verifier_last_hidden_states"], clean["verifier_last_hidden_states"])
    assert modes == {True, False}
    assert module.draft.training
    assert not module.draft.lm_head.training


def test_noise_depends_on_seed_epoch_and_rows_alone() -> None:
    seeds = {pack_seed(s, e, rows) for s in (0, 1) for e in (0, 1) for rows in ([1, 2], [2, 1], [1], [])}
    assert len(seeds) == 16
    assert pack_seed(0, 0, [1, 2]) == pack_seed(0, 0, (1, 2)) < 2**63


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_loader_threads_change_nothing(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any, noise: float
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=3)
    none, _ = train_run(store, tmp_path / "0", train, noise=noise)
    two, _ = train_run(store, tmp_path / "2", train, noise=noise, threads=2)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tiny.weights(none).values(), tiny.weights(two).values(), strict=True)
    )


def test_validation_in_between_changes_no_weight(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=4, validate_every_updates=100)
    often = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=4, validate_every_updates=1)
    a, _ = train_run(store, tmp_path / "a", train, noise=0.05)
    b, summary = train_run(store, tmp_path / "b", often, noise=0.05)
    assert summary.last_validation["update"] == 4
    assert all(
        torch.equal(x, y) for x, y in zip(tiny.weights(a).values(), tiny.weights(b).values(), strict=True)
    )


def test_a_batch_that_is_not_the_planned_one_stops_the_run(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3lab.training import loader
    from eagle3lab.training.trainer import fit

    train = TrainerConfig(seq_len=tiny.SEQ_LEN)
    module, data = tiny.build(store, train)
    honest = loader.PlannedBatches.__iter__
    monkeypatch.setattr(loader.PlannedBatches, "__iter__", lambda self: iter(list(honest(self))[::-1]))
    with pytest.raises(RuntimeError, match="the plan says"):
        fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path)
