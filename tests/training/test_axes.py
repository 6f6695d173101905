"""Noise kinds, heads and shares of the data, through whole runs of the tiny verifier."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.config.schema import DraftConfig, HeadStart, TrainerConfig, TrainingStep
from eagle3lab.draft.export import export_draft
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_state import load_weights

KINDS = [
    NoiseConfig(NoiseKind.uniform, 0.3, relative=True),
    NoiseConfig(NoiseKind.gaussian, 0.3, relative=True),
    NoiseConfig(NoiseKind.eagle, 0.02),
]


def head_of(tiny: ModuleType, start: HeadStart, trained: bool) -> DraftConfig:
    return DraftConfig(name="test", ttt_steps=tiny.TTT_STEPS, head=start, train_head=trained)


@pytest.mark.parametrize("noise", KINDS, ids=lambda n: n.kind.value + "-relative" * n.relative)
def test_noise_of_every_kind_is_the_same_after_a_stop(
    noise: NoiseConfig, tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=3, max_updates=8, save_every_updates=1)
    whole, _ = train_run(store, tmp_path / "whole", train, noise=noise)
    with pytest.raises(tiny.Stop):
        train_run(store, tmp_path / "cut", train, noise=noise, loggers=(tiny.StopAt(8),))
    resumed, summary = train_run(store, tmp_path / "cut", train, noise=noise, resume=True)
    assert summary.resumed_from_update > 0
    plain, _ = train_run(store, tmp_path / "plain", train)
    ends = [tiny.weights(module) for module in (whole, resumed, plain)]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    assert any(not torch.equal(weight, ends[2][name]) for name, weight in ends[0].items())


def test_the_metrics_say_how_large_the_noise_is(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=2)
    train_run(store, tmp_path, train, noise=KINDS[0])
    with (tmp_path / "metrics.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["train/loss"]]
    names = [name for name in rows[0] if name.startswith("noise/")]
    assert names == [f"noise/ratio_layer{layer}" for layer in tiny.AUX_IDS]
    assert [float(rows[0][name]) for name in names] == pytest.approx([0.3 / math.sqrt(3)] * 3)


@pytest.mark.parametrize("start", HeadStart)
@pytest.mark.parametrize("trained", [False, True])
def test_a_head_moves_where_it_is_trained_alike_in_both_steps_and_is_exported(
    start: HeadStart, trained: bool, tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=3)
    draft = head_of(tiny, start, trained)
    untrained = tiny.build(store, train, draft=draft)[0].draft.lm_head.weight.detach().clone()
    rows = tiny.edge_weights().head[tiny.VOCABULARY.verifier_ids]
    scale = 4.0 if trained else 1.0  # the tiny run enlarges what is trained
    assert torch.equal(untrained, rows * scale) is (start is HeadStart.verifier)
    heads = {}
    for step in TrainingStep:
        module, summary = train_run(store, tmp_path / step.value, train, draft=draft, step=step)
        heads[step] = module.draft.lm_head.weight.detach().clone()
        assert torch.equal(module.draft.verifier_lm_head.weight, rows)
        held = torch.load(summary.last_checkpoint, weights_only=True)["state_dict"]
        assert ("draft.lm_head.weight" in held) is trained
        with torch.no_grad():
            if trained:
                module.draft.lm_head.weight.zero_()
        load_weights(module.draft, Path(summary.last_checkpoint))
        assert torch.equal(module.draft.lm_head.weight, heads[step])
        export_draft(module.draft, tmp_path / step.value / "draft", {})
        assert torch.equal(
            load_file(tmp_path / step.value / "draft" / "model.safetensors")["lm_head.weight"], heads[step]
        )
    torch.testing.assert_close(heads[TrainingStep.pruned], heads[TrainingStep.reference], rtol=0, atol=2e-3)
    assert torch.equal(heads[TrainingStep.pruned], untrained) is not trained


def test_a_trained_head_goes_on_after_a_stop(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=5, max_epochs=3)
    settings = {"draft": head_of(tiny, HeadStart.random, True), "step": TrainingStep.pruned}
    whole, _ = train_run(store, tmp_path / "whole", train, **settings)
    train_run(store, tmp_path / "cut", replace(train, max_updates=2), **settings)
    resumed, summary = train_run(store, tmp_path / "cut", train, resume=True, **settings)
    assert summary.resumed_from_update == 2
    assert all(torch.equal(w, tiny.weights(resumed)[name]) for name, w in tiny.weights(whole).items())


def test_a_share_of_the_data_trains_on_its_rows_alone_and_counts_their_tokens(
    tiny: ModuleType, store: StoreReader
) -> None:
    whole = tiny.build(store, TrainerConfig(seq_len=tiny.SEQ_LEN))[1]
    module, data = tiny.build(store, TrainerConfig(seq_len=tiny.SEQ_LEN, data_share=0.5))
    assert 0 < len(data.train_data) < len(whole.train_data)
    assert len(data.validation_data) == len(whole.validation_data)
    assert set(data.train_data.store_rows()) < set(whole.train_data.store_rows())
    assert module.plan.num_rows == len(data.train_data)
    counts = torch.zeros(tiny.VOCAB, dtype=torch.int64)
    for row in data.train_data.store_rows():
        for token, supervised in zip(*(t.tolist() for t in store.read_tokens(row)), strict=True):
            counts[token] += supervised
    assert torch.equal(data.token_counts(), counts)
    assert torch.equal(whole.token_counts(), store.token_counts())
