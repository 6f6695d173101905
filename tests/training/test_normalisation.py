"""Every normalisation and supervision rule against token losses of one row at a time, averaged by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.schema import LossConfig, LossKind, Normalisation, Supervision, TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.loss_weights import loss_weights

NORMALISATIONS = list(Normalisation)
STEPS = 3


def row_losses(tiny: ModuleType, module: Any, data: Any, row: int) -> list[Tensor]:
    """KL of every supervised token of one row alone, per step, with graph; by the store's own mask."""
    from speculators.losses import resolve_loss_config

    kl = resolve_loss_config("kl_div", "eager")["kl_div"][0]
    sample = data.train_data[row]
    kept: list[Tensor] = []

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        kept.append(kl(logits, targets)[0])
        return kept[-1][None]

    batch = create_collate_fn(int(sample["lengths"]))([sample])
    inputs = {k: v for k, v in batch.items() if k not in ("lengths", "row_index")}
    module.draft(**inputs, ttt_steps=STEPS, loss_config={"kept": (keep, 1.0)})
    source = data.train_data._source
    mask = source.read_mask(row).bool().tolist()
    given, guessed = mask[1:], [*mask[2:], False]  # of position j: token j + 1 is put in, j + 2 is guessed
    counts = {
        Supervision.input_token: given,
        Supervision.predicted_token: guessed,
        Supervision.both: [a and b for a, b in zip(given, guessed, strict=True)],
    }[data.supervision]
    return [losses[torch.tensor(counts[k:], dtype=torch.bool)] for k, losses in enumerate(kept)]


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean() if values else torch.zeros(())


def average(packs: list[list[list[Tensor]]], k: int, normalisation: Normalisation) -> Tensor:
    """L_k of an update, packs[p][r][k]: the token losses of row r of pack p."""
    if normalisation is Normalisation.token:
        return torch.cat([row[k] for pack in packs for row in pack]).mean()
    if normalisation is Normalisation.pack:
        of_pack = [torch.cat([row[k] for row in pack]) for pack in packs]
        return mean([losses.mean() if len(losses) else losses.sum() for losses in of_pack])
    return mean([row[k].mean() for pack in packs for row in pack if len(row[k])])


def mixed_rows(tiny: ModuleType) -> list[Any]:
    """Long and short rows, some with so few supervised tokens that later steps have none, one without any."""
    lengths = [(29, 2), (12, 9), (9, 8), (17, 15), (28, 27), (20, 20), (8, 1), (11, 9), (25, 24), (14, 3)]
    return [tiny.make_row(n, "train", i, supervised_from=first) for i, (n, first) in enumerate(lengths)]


@pytest.fixture(scope="module")
def mixed(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    return tiny.write_store(tmp_path_factory.mktemp("mixed") / "store", mixed_rows(tiny))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("normalisation", "supervision"),
    [
        (Normalisation.token, Supervision.predicted_token),
        (Normalisation.token, Supervision.both),
        (Normalisation.pack, Supervision.input_token),
        (Normalisation.sequence, Supervision.input_token),
        (Normalisation.sequence, Supervision.both),
    ],
)
def test_an_updates_loss_and_gradients_are_the_average_named(
    tiny: ModuleType,
    mixed: StoreReader,
    tmp_path: Path,
    train_run: Any,
    gradients: list[dict[str, Tensor]],
    normalisation: Normalisation,
    supervision: Supervision,
    micro_batches: int,
) -> None:
    loss = LossConfig(step_decay=0.7, normalisation=normalisation, supervision=supervision)
    train = TrainerConfig(
        seq_len=tiny.SEQ_LEN,
        tokens_per_update=micro_batches * tiny.SEQ_LEN,
        max_updates=1,
        log_every_updates=1,
    )
    _, summary = train_run(mixed, tmp_path, train, loss=loss)

    module, data = tiny.build(mixed, train, loss=loss)
    packs = [[row_losses(tiny, module, data, row) for row in pack] for pack in module.plan.update(0).packs]
    if micro_batches > 1:
        assert any(len(pack) > 1 for pack in packs)
    wanted = sum((0.7**k * average(packs, k, normalisation) for k in range(STEPS)), torch.zeros(()))
    wanted.backward()
    assert summary.last["train/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    for k in range(STEPS):  # the logged losses of the steps are means over tokens, whatever is minimised
        tokens = torch.cat([row[k] for pack in packs for row in pack])
        shown = summary.last[f"train/loss_step{k}"]
        assert shown == pytest.approx(tokens.mean().item() if len(tokens) else 0.0, rel=1e-5)
    for name, parameter in module.draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert float((gradients[0][name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name


def test_pack_normalisation_is_the_mean_of_speculators_own_losses(
    tiny: ModuleType, tmp_path: Path, train_run: Any
) -> None:
    from speculators.losses import resolve_loss_config

    rows = [tiny.make_row(tiny.SEQ_LEN + 1, "train", i, supervised_from=i) for i in (3, 12, 21)]
    store = tiny.write_store(tmp_path / "store", rows)
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, tokens_per_update=3 * tiny.SEQ_LEN, log_every_updates=1)
    loss = LossConfig(step_decay=0.8, normalisation=Normalisation.pack)
    _, summary = train_run(store, tmp_path / "run", train, loss=loss)
    module, data = tiny.build(store, train)
    theirs = []
    for row in range(3):
        batch = create_collate_fn(tiny.SEQ_LEN)([data.train_data[row]])
        inputs = {k: v for k, v in batch.items() if k not in ("lengths", "row_index")}
        kl = resolve_loss_config("kl_div", "eager")
        theirs.append(module.draft(**inputs, ttt_steps=3, ttt_step_loss_decay=0.8, loss_config=kl)[1].item())
    assert summary.last["train/loss"] == pytest.approx(sum(theirs) / 3, rel=1e-5)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_without_supervised_tokens_the_loss_is_zero_and_nothing_moves(
    tiny: ModuleType, tmp_path: Path, train_run: Any, normalisation: Normalisation
) -> None:
    rows = [tiny.make_row(30, "train", i, supervised_from=30) for i in range(2)]
    store = tiny.write_store(tmp_path / "store", rows)
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, log_every_updates=1)
    module, summary = train_run(store, tmp_path / "run", train, loss=LossConfig(normalisation=normalisation))
    fresh, _ = tiny.build(store, train)
    assert summary.last["train/loss"] == 0.0
    assert all(
        torch.equal(a, b)
        for a, b in zip(tiny.weights(module).values(), tiny.weights(fresh).values(), strict=True)
    )


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(LossKind.lk, lk_eta=2.0),
        LossConfig(
            LossKind.sum,
            {"ce": 0.5, "tv": 1.0},
            normalisation=Normalisation.sequence,
            supervision=Supervision.both,
        ),
    ],
)
def test_validation_measures_the_same_tokens_and_the_same_mean_for_every_loss(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any, loss: LossConfig
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=1)
    still = tiny.optim(lr=1e-12)
    _, plain = train_run(store, tmp_path / "plain", train, optim=still)
    _, other = train_run(store, tmp_path / "other", train, optim=still, loss=loss)
    same = [name for name in plain.last_validation if "loss" not in name]
    assert "val/simulated_acceptance_length" in same
    for name in same:
        assert other.last_validation[name] == plain.last_validation[name], name


COUNTS = [[[4, 2, 0], [6, 3, 0]], [[0, 0, 0]], [[5, 0, 0]]]  # packs, rows, steps


def test_token_weights_divide_by_all_tokens_of_the_update() -> None:
    assert loss_weights(COUNTS, 0.5, Normalisation.token) == [
        [(1 / 15, 0.5 / 5, 0.0)] * 2,
        [(1 / 15, 0.5 / 5, 0.0)],
        [(1 / 15, 0.5 / 5, 0.0)],
    ]


def test_pack_weights_divide_by_the_packs_tokens_and_the_number_of_packs() -> None:
    assert loss_weights(COUNTS, 0.5, Normalisation.pack) == [
        [(1 / 30, 0.5 / 15, 0.0)] * 2,
        [(0.0, 0.0, 0.0)],
        [(1 / 15, 0.0, 0.0)],
    ]


def test_sequence_weights_divide_by_the_rows_tokens_and_the_rows_that_have_any() -> None:
    assert loss_weights(COUNTS, 0.5, Normalisation.sequence) == [
        [(1 / 12, 0.5 / 4, 0.0), (1 / 18, 0.5 / 6, 0.0)],
        [(0.0, 0.0, 0.0)],
        [(1 / 15, 0.0, 0.0)],
    ]


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_a_token_loss_of_one_everywhere_makes_the_loss_of_a_step_its_share(
    normalisation: Normalisation,
) -> None:
    weights = loss_weights(COUNTS, 0.5, normalisation)
    totals = [
        sum(
            row[k] * w[k]
            for pack, ws in zip(COUNTS, weights, strict=True)
            for row, w in zip(pack, ws, strict=True)
        )
        for k in range(3)
    ]
    # of three packs, two have tokens at step 0 and one at step 1
    shares = (2 / 3, 1 / 3) if normalisation is Normalisation.pack else (1.0, 1.0)
    assert totals == pytest.approx([shares[0], 0.5 * shares[1], 0.0])
