"""TRN, PAR and VOC cases that a run decides: from a store of the case's rows through `fit` to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from case_run import CONSTANT, LENGTH, Run, config, expected, largest_difference, logged, weights

from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.schema import Normalisation, OptimConfig, Precision, Schedule
from eagle3lab.data import PackBatchSampler
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.training import module as training_module
from eagle3lab.training.checkpoint_files import LAST
from eagle3lab.training.loss_weights import loss_weights
from eagle3lab.training.metrics import Sums, validation_figures, validation_widths
from eagle3lab.training.optim import build_learning_rate
from eagle3lab.training.run_plan import RunPlan
from eagle3lab.config.names import CHECKPOINTS

CASES = Path(__file__).parent


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training_module,
        "build_optimizers",
        lambda parameters, optim: [
            torch.optim.SGD([p for _, p in parameters if p.requires_grad], lr=optim.lr)
        ],
    )


def test_trn_04_the_mean_is_over_the_update_and_not_over_its_micro_batches(
    run_of: Callable[..., Run], tmp_path: Path, sgd: None
) -> None:
    case = expected("TRN-04")
    batches = case["micro_batches"]
    weighed = loss_weights([[(b["supervised"],)] for b in batches], 1.0, Normalisation.token)
    parts = zip(batches, weighed, strict=True)
    assert sum(b["supervised"] * b["mean_loss"] * rows[0][0] for b, rows in parts) == case["right_mean"]

    run = run_of("TRN-04", "one_token", "three_tokens")
    optim = replace(CONSTANT, lr=0.5)
    update = {"tokens_per_update": 2 * LENGTH, "max_updates": 1}
    start, _ = run(tmp_path / "zero", config(**update), optim=replace(CONSTANT, lr=0.0))
    one, _ = run(tmp_path / "one", config(seq_len=2 * LENGTH, **update), optim=optim)
    two, summary = run(tmp_path / "two", config(**update), optim=optim)
    assert summary.micro_batches_per_update == 2
    assert largest_difference(one, two) < 1e-6
    assert largest_difference(one, start) > 1e-3  # moved at all
    # an incomplete last update divides by its own tokens: each row alone is a run of its own
    single = {name: run_of("TRN-04", name) for name in ("one_token", "three_tokens")}
    module, _ = run(tmp_path / "odd", config(tokens_per_update=LENGTH, max_updates=1), optim=optim)
    first = module.plan.update(0).rows[0]
    alone, _ = single[("one_token", "three_tokens")[first]](
        tmp_path / "alone", config(tokens_per_update=2 * LENGTH, max_epochs=1), optim=optim
    )
    assert alone.plan.update(0).num_micro_batches == 1
    assert largest_difference(module, alone) < 1e-6


def test_trn_18_the_logged_loss_is_the_mean_of_the_whole_update(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    run, frozen = run_of("TRN-04", "one_token", "three_tokens"), replace(CONSTANT, lr=0.0)
    update = {"tokens_per_update": 2 * LENGTH, "max_updates": 1}
    run(tmp_path / "one", config(seq_len=2 * LENGTH, **update), optim=frozen)
    run(tmp_path / "two", config(**update), optim=frozen)
    (whole,), (split,) = logged(tmp_path / "one", "train/loss"), logged(tmp_path / "two", "train/loss")
    assert split == pytest.approx(whole, rel=1e-5)
    run(tmp_path / "rows", config(max_updates=2), optim=frozen)
    losses = logged(tmp_path / "rows", "train/loss_step0")
    step0 = logged(tmp_path / "two", "train/loss_step0")[0]
    assert any((1 * a + 3 * b) / 4 == pytest.approx(step0) for a, b in (losses, losses[::-1]))


def test_trn_07_an_update_without_supervised_tokens_moves_nothing(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    empty = run_of("TRN-07", "hs_0", "hs_1")
    train = config(seq_len=2 * LENGTH, max_updates=1)
    still, _ = empty(tmp_path / "still", train, optim=replace(CONSTANT, lr=0.0))
    module, summary = empty(tmp_path / "empty", train)
    assert summary.last["train/loss"] == expected("TRN-07")["batch_[0,1]"]["loss"]
    assert largest_difference(module, still) == 0.0
    beside, _ = run_of("TRN-07", "hs_0", "hs_2")(tmp_path / "beside", train)
    alone, _ = run_of("TRN-07", "hs_2")(tmp_path / "alone", train)
    assert 0 < largest_difference(alone, still)
    assert largest_difference(beside, alone) < 1e-6


def test_trn_09_norms_move_in_bf16_because_masters_and_states_are_fp32(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    case = yaml.safe_load((CASES / "TRN-09" / "override.yaml").read_text())["train"]
    train = config(max_updates=case["steps"], log_every_updates=100)
    optim = replace(CONSTANT, lr=case["lr"])
    module, _ = run_of("TRN-09", "row")(tmp_path, train, optim=optim, precision=Precision.bf16)
    norms = {name: w for name, w in weights(module).items() if w.ndim == 1}
    assert len(norms) == 4
    for name, weight in norms.items():
        assert bool((weight != 1.0).all()), name
    states = torch.load(tmp_path / CHECKPOINTS / LAST, weights_only=True)["optimizer_states"][0]["state"]
    kinds = {state[name].dtype for state in states.values() for name in ("exp_avg", "exp_avg_sq")}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("accumulate", expected("TRN-11")["for_accumulate"])
@pytest.mark.parametrize("layout", expected("TRN-11")["for_epochs_x_batches"])
def test_trn_11_the_schedule_counts_updates(accumulate: int, layout: list[int]) -> None:
    case = expected("TRN-11")
    given = yaml.safe_load((CASES / "TRN-11" / "override.yaml").read_text())["train"]
    epochs, batches = layout
    packs = [[i] for i in range(batches * accumulate)]
    plan = RunPlan(
        lambda _: packs,
        [1] * len(packs),
        num_replicas=1,
        micro_batches=accumulate,
        max_epochs=epochs,
        max_updates=given["max_steps"],
    )
    assert plan.num_updates == given["max_steps"]
    rate = build_learning_rate(
        OptimConfig(
            lr=given["lr"],
            schedule=Schedule[given["schedule"]],
            lr_warmup_updates=given["warmup_steps"],
        ),
        plan,
    )
    assert [rate(u) for u in range(10)] == pytest.approx(case["lr_at_update"], abs=case["tolerance"])


def test_trn_12_validation_has_no_noise_and_repeats_itself(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    run = run_of("TRN-12", "row", validation=["row"])
    train = config(max_updates=2, validate_every_updates=1)
    frozen = replace(CONSTANT, lr=0.0)
    for name, noise in (("plain", 0.0), ("noisy", 0.5)):
        run(tmp_path / name, train, optim=frozen, noise=noise)
    plain, noisy = (logged(tmp_path / name, "val/loss") for name in ("plain", "noisy"))
    assert plain == noisy == [plain[0]] * 2
    assert logged(tmp_path / "plain", "train/loss") != logged(tmp_path / "noisy", "train/loss")


def test_trn_14_validation_leaves_modes_and_parameters_as_they_were(
    run_of: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[tuple[str, bool]] = []
    for stage in ("training_step", "validation_step"):
        original = getattr(training_module.Eagle3Module, stage)

        def step(self: Any, *args: Any, stage: str = stage, original: Any = original) -> Any:
            modes.append((stage.split("_")[0], self.draft.training))
            frozen = [m for m in self.draft.modules() if any(True for _ in m.parameters())]
            frozen = [m for m in frozen if not any(p.requires_grad for p in m.parameters())]
            assert len(frozen) == 4  # embedding, head, the verifier's head and norm
            assert not any(m.training for m in frozen)
            return original(self, *args)

        monkeypatch.setattr(training_module.Eagle3Module, stage, step)
    run = run_of("TRN-14", "row", validation=["row"])
    train = config(max_updates=4, validate_every_updates=2)
    module, _ = run(tmp_path / "with", train)
    run(tmp_path / "with", replace(train, max_updates=5, validate_every_updates=100), resume=True)
    order = [name for i, (name, _) in enumerate(modes) if i == 0 or modes[i - 1][0] != name]
    assert order == ["training", "validation"] * 3
    assert all(training is (name == "training") for name, training in modes)
    assert [training for _, training in (modes[1], modes[2], modes[3], modes[6])] == expected("TRN-14")[
        "draft.training"
    ]
    assert not module.draft.verifier_norm.weight.requires_grad
    assert not module.draft.lm_head.weight.requires_grad
    assert not module.draft.embed_tokens.weight.requires_grad
    without, _ = run_of("TRN-14", "row")(tmp_path / "without", train)
    assert largest_difference(module, without) == 0.0


@pytest.mark.parametrize("case_id", ["PAR-01", "PAR-03"])
def test_par_01_par_03_the_plan_of_a_run_gives_every_row_to_one_rank_once_per_epoch(case_id: str) -> None:
    case = expected(case_id)
    batch = case.get("batch") or case["micro_batch"]
    ranks = case.get("ranks") or case["data_parallel"]
    sampler = PackBatchSampler([10] * case["rows"], 10 * batch)
    plan = RunPlan(sampler.plan, [10] * case["rows"], num_replicas=ranks, micro_batches=1, max_epochs=2)
    per_epoch = -(-case["rows"] // (batch * ranks))
    assert plan.num_updates == 2 * per_epoch
    seen = [[list(plan.update(u).row_index(0, rank)) for rank in range(ranks)] for u in range(2 * per_epoch)]
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        rows = [row for update in epoch for pack in update for row in pack]
        # the rest of an epoch is trained too; a rank without a pack gets one row without weight
        assert sorted(row for row in rows if row >= 0) == list(range(case["rows"]))
        assert rows.count(-1) == per_epoch * ranks - case["rows"] // batch
        assert all(len(pack) == batch for pack in epoch[0])  # every epoch begins with a full global batch
    assert [len(list(plan.packs_of_rank(rank))) for rank in range(ranks)] == [2 * per_epoch] * ranks


def test_par_04_a_reduced_metric_stays_itself() -> None:
    """The two ranks' counts; the sum over real ranks is in tests/distributed."""
    case = expected("PAR-04")
    correct, total = (sum(rank[name] for rank in case["ranks"]) for name in ("correct", "total"))
    sums = Sums(validation_widths(1), "cpu")
    same = torch.tensor([float(total)])
    hits = torch.tensor([float(correct)])
    sums.add({"loss_step": same, "correct": hits, "prefix_correct": hits, "totals": same, "covered": same})
    figures = [validation_figures(sums.reduce(), 1.0) for _ in range(2)]
    assert figures[0] == figures[1]
    for name in ("val/accuracy_step0", "val/acceptance_step0", "val/conditional_accuracy_step0"):
        assert figures[0][name] == pytest.approx(case["right"])
    assert all(0 <= v <= 1 for name, v in figures[0].items() if "accuracy" in name or "coverage" in name)


def test_voc_03_a_run_resumed_with_another_mapping_is_refused(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    saved = json.loads((CASES / "VOC-03" / "checkpoint_mapping.json").read_text())["selected"]
    counts = torch.zeros(264, dtype=torch.int64)
    for token, count in json.loads((CASES / "VOC-03" / "new_data_counts.json").read_text()).items():
        counts[int(token)] = count
    run = run_of("TRN-12", "row", ids=saved)
    module, _ = run(tmp_path / "run", config(max_updates=1))
    assert module.vocabulary.verifier_ids.tolist() == saved
    other = DraftVocabulary.from_counts(counts, len(saved)).verifier_ids.tolist()
    with pytest.raises(IntegrityError, match="draft vocabulary differs"):
        replace(run, ids=other)(tmp_path / "run", config(max_updates=2), resume=True)
    again, _ = run(tmp_path / "run", config(max_updates=2), resume=True)
    assert again.vocabulary.verifier_ids.tolist() == saved
