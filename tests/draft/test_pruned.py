"""The pruned step against speculators' own forward, and facts about it that need no reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import LayerType, LossConfig, LossKind
from eagle3lab.draft.frozen import shrink_frozen, widen_frozen
from eagle3lab.draft.pruned import elementwise
from eagle3lab.draft.pruned.heads import Head, Targets, differentiated, kl_with_gradient, step_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient as with_gradient
from eagle3lab.draft.pruned.plan import PrunedPlan, plan_pack
from eagle3lab.draft.pruned.step import check_prunable, pruned_forward
from eagle3lab.draft.pruned.unrolled import windows_of
from eagle3lab.draft.pruned.weights import Matrix, stacked
from eagle3lab.draft.ttt import LossRecorder, ttt_forward
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights

from .pruned_cases import differences, gradients, random_case, same_tokens

# More with EAGLE3LAB_PRUNED_CASES=200
NUM_CASES = int(os.environ.get("EAGLE3LAB_PRUNED_CASES", "24"))
K = 3
KL = with_gradient(LossConfig(), compiled=False)

MakeDraft = Callable[..., Any]
MakeBatch = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_loss_and_every_gradient_equal_speculators_on_random_drafts_and_packs(
    seed: int, facts: VerifierFacts, edge: EdgeWeights
) -> None:
    case = random_case(seed, facts, edge)
    loss, gradient = differences(case)
    print(f"{loss:.2e} {gradient:.2e} {case.text}")
    assert loss < 1e-5, case.text
    assert gradient < 1e-5, case.text

    def check(holds: bool, what: str) -> None:
        assert holds, f"{what}: {case.text}"

    same_tokens(case, check)


def run(model: Any, batch: dict[str, Tensor], plan: PrunedPlan | None = None) -> Any:
    return pruned_forward(model, batch, K, KL, plan=plan, compiled=False)


def assert_close_gradients(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    largest = max(float(g.abs().max()) for g in b.values())
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= tolerance * largest, name


def test_a_row_alone_gives_what_it_gives_in_any_pack(make_draft: MakeDraft, make_batch: MakeBatch) -> None:
    model, lengths = make_draft(num_layers=2), (9, 1, 2, 12)
    pack = make_batch(lengths, seq_len=30, supervised=0.6)
    whole = run(model, pack)
    in_pack = gradients(model, whole.loss_sums.sum())
    sums, start = torch.zeros(K), 0
    alone: dict[str, Tensor] = {}
    for length in lengths:
        part = {k: v[:, start : start + length] for k, v in pack.items() if k != "lengths"}
        output = run(model, part)
        sums += output.loss_sums.detach()
        for name, grad in gradients(model, output.loss_sums.sum()).items():
            alone[name] = alone.get(name, 0) + grad
        start += length
    torch.testing.assert_close(whole.loss_sums.detach(), sums, rtol=1e-5, atol=1e-5)
    assert_close_gradients(in_pack, alone)


def test_what_no_loss_depends_on_may_be_nan(make_draft: MakeDraft, make_batch: MakeBatch) -> None:
    model, batch = make_draft(num_layers=2), make_batch((8, 6, 10), seq_len=28)
    batch["loss_mask"][0, :] = 0
    batch["loss_mask"][0, 3:6] = 1  # first document: 3 to 5
    batch["loss_mask"][0, 18:21] = 1  # third: 4 to 6 of its 10
    clean = run(model, batch)
    expected = gradients(model, clean.loss_sums.sum())
    supervised = batch["loss_mask"][0] > 0
    batch["verifier_last_hidden_states"][0, ~supervised] = float("nan")
    # after the last start of a document, in a document without loss, in padding
    batch["hidden_states"][0, [6, 7, *range(8, 14), *range(21, 24), *range(24, 28)]] = float("nan")
    dirty = run(model, batch)
    assert torch.equal(clean.loss_sums, dirty.loss_sums)
    found = gradients(model, dirty.loss_sums.sum())
    assert all(torch.equal(found[n], g) for n, g in expected.items())


def test_without_supervision_loss_and_every_gradient_are_zero(
    make_draft: MakeDraft, make_batch: MakeBatch
) -> None:
    model, batch = make_draft(), make_batch((12,), supervised=0.0)
    output = run(model, batch)
    assert output.loss_sums.tolist() == output.token_loss_sums.tolist() == [0.0] * K
    assert output.num_supervised.tolist() == [0] * K
    found = gradients(model, output.loss_sums.sum())
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(not g.any() for g in found.values())


@pytest.mark.parametrize("train_head", [False, True])
def test_a_gradient_is_handed_on_as_soon_as_it_is_whole(
    train_head: bool, make_draft: MakeDraft, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks sum it while the rest is computed: all at the end would be all waited for."""
    model = make_draft(train_head=train_head)
    events: list[str] = []
    added = Matrix.add

    def add(matrix: Matrix, *arguments: Any) -> None:
        events.append("product")
        added(matrix, *arguments)

    monkeypatch.setattr(Matrix, "add", add)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.register_post_accumulate_grad_hook(partial(lambda n, _: events.append(n), name))
    run(model, make_batch((9, 7))).loss_sums.sum().backward()
    products = [i for i, event in enumerate(events) if event == "product"]
    left = {
        event.split(".")[-2]: sum(i > at for i in products)
        for at, event in enumerate(events)
        if event != "product"
    }
    # after it: the output of attention, then its inputs (rows, context, embedding ahead), then the first projection
    assert left["fc"] == 0
    assert left["q_proj"] == left["k_proj"] == left["v_proj"] == 1
    assert left["o_proj"] > 3
    assert left["down_proj"] == left["gate_proj"] == left["up_proj"] == left["o_proj"] + 1
    if train_head:
        assert left["lm_head"] == left["down_proj"] + 2


@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_to_buckets_changes_nothing(
    num_layers: int, make_draft: MakeDraft, make_batch: MakeBatch
) -> None:
    model, batch = make_draft(num_layers=num_layers), make_batch((20, 7), seq_len=30, supervised=0.4)
    masks = batch["document_ids"], batch["loss_mask"], K, windows_of(model)
    plain = run(model, batch, plan_pack(*masks))
    padded = run(model, batch, plan_pack(*masks, bucket=64))
    torch.testing.assert_close(plain.loss_sums, padded.loss_sums, rtol=1e-6, atol=1e-6)
    assert torch.equal(plain.draft_tokens, padded.draft_tokens)
    first = gradients(model, plain.loss_sums.sum())
    assert_close_gradients(gradients(model, padded.loss_sums.sum()), first, 1e-6)


def test_documents_in_pieces_are_still_told_apart(make_draft: MakeDraft, make_batch: MakeBatch) -> None:
    model, batch = make_draft(), make_batch((20,), supervised=0.7)
    batch["document_ids"] = torch.tensor([[0] * 6 + [1] * 5 + [0] * 4 + [1] * 5])
    expected = ttt_forward(
        model, batch, K, LossRecorder(lambda z, t: KL(z[0], t[0], torch.arange(z.shape[1]), None)[0][None])
    )
    torch.testing.assert_close(run(model, batch).loss_sums, expected.loss_sums, rtol=1e-5, atol=1e-5)


def test_a_plan_holds_what_is_seen_and_nothing_else() -> None:
    documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, -1])
    loss_mask = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1])
    plan = plan_pack(documents, loss_mask, 2)
    assert plan.rows.tolist() == [2, 3, 7, 8, 9]  # 6 would predict into another document
    assert plan.context.tolist() == [0, 1, 2, 3, 7, 8, 9]
    assert plan.targets[:3].tolist() == [3, 7, 9]
    assert plan.ahead.tolist() == [2, 3, 4, 7, 8, 9, 10]
    assert plan.counted.int().tolist() == [[0, 1, 1, 0, 1], [1, 0, 0, 1, 0]]
    near = plan_pack(documents, loss_mask, 2, windows=(2,))
    assert near.context.tolist() == [1, 2, 3, 7, 8, 9]
    assert plan_pack(documents, loss_mask, 2, windows=(2, 2)).context.tolist() == [0, 1, 2, 3, 7, 8, 9]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_listed_blocks_hold_every_pair_and_full_ones_nothing_else(
    window: int | None, in_pieces: bool
) -> None:
    rng = np.random.default_rng(3)
    lengths = [300, 1, 40, 260, 129, 200]
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    if in_pieces:
        documents = documents.roll(100)
    loss_mask = torch.from_numpy(rng.random(documents.numel()) < 0.3)
    plan = plan_pack(documents, loss_mask, K, (window, window), bucket=128, flex=True)
    for (name, _), lists in plan.blocks.items():
        q_pos, q_doc, k_pos, k_doc = (
            getattr(lists, n).long().numpy()
            for n in ("query_position", "query_document", "key_position", "key_document")
        )
        distance = q_pos[:, None] - k_pos[None]
        seen = (q_doc[:, None] == k_doc[None]) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        assert seen.sum() > 0, name
        blocks = seen.reshape(len(q_pos) // 128, 128, len(k_pos) // 128, 128)
        listed, full = (np.zeros((blocks.shape[0], blocks.shape[2]), bool) for _ in range(2))
        for i in range(blocks.shape[0]):
            full[i, lists.full[0, 0, i, : lists.num_full[0, 0, i]].numpy()] = True
            listed[i, lists.partial[0, 0, i, : lists.num_partial[0, 0, i]].numpy()] = True
        assert not (listed & full).any()
        assert not (blocks.any(axis=(1, 3)) & ~listed & ~full).any()
        assert blocks.all(axis=(1, 3))[full].all()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("fields", [{}, {"num_layers": 2, "sliding_window": 20}])
def test_flex_attention_over_listed_blocks_gives_the_dense_loss(
    fields: dict[str, Any], make_draft: MakeDraft, make_batch: MakeBatch
) -> None:
    model, batch = make_draft(**fields), make_batch((60, 1, 150), seq_len=240, supervised=0.3)
    masks = batch["document_ids"], batch["loss_mask"], K, windows_of(model)
    with torch.no_grad():
        dense = run(model, batch)
        flex = run(model, batch, plan_pack(*masks, bucket=128, flex=True))
    torch.testing.assert_close(flex.loss_sums, dense.loss_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_gives_the_dense_gradients_too(
    make_draft: MakeDraft, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch refuses the backward on the CPU because it has no kernel for it; written out, as here, it works
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model, batch = make_draft(), make_batch((60, 1, 150), seq_len=240, supervised=0.3)
    plan = plan_pack(batch["document_ids"], batch["loss_mask"], K, bucket=128, flex=True)
    dense = gradients(model, run(model, batch).loss_sums.sum())
    assert_close_gradients(gradients(model, run(model, batch, plan).loss_sums.sum()), dense)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_the_chunked_heads_gradient_is_that_of_the_loss_in_fp64(trained: bool, max_bytes: int) -> None:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    states, matrix, verifier, norm, head = draw(7, 5), draw(11, 5), draw(7, 5), draw(5), draw(11, 5)
    index = torch.tensor([3, 0, 6, 2, 2, 1, 0])
    counted = torch.tensor([True, True, False, True, True, True, False])
    weights = torch.where(counted, draw(7).abs(), 0.0)

    def weighted_sum(states: Tensor, matrix: Tensor) -> Tensor:
        targets = Targets(verifier, norm, 1e-6, head, compiled=False, max_bytes=max_bytes)
        weight = stacked([matrix], torch.float64) if trained else None
        made = Head(matrix.detach(), weight, targets, kl_with_gradient(compiled=False), False)
        return 3.0 * step_loss(made, states, index, counted, weights).weighted

    inputs = states.requires_grad_(), matrix.requires_grad_(trained)
    assert torch.autograd.gradcheck(weighted_sum, inputs, atol=1e-7)


@pytest.mark.parametrize("kind", [LossKind.kl, LossKind.js])
def test_a_loss_written_out_and_one_by_autograd_agree(kind: LossKind) -> None:
    from eagle3lab.draft.losses import token_loss

    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 40, generator=g), torch.randn(9, 40, generator=g)
    index, weights = torch.tensor([8, 1, 1, 0, 5, 2]), torch.rand(6, generator=g)
    a = with_gradient(LossConfig(kind=kind), compiled=False)(logits, targets, index, weights)
    b = differentiated(token_loss(LossConfig(kind=kind)), compiled=False)(logits, targets, index, weights)
    for x, y in zip(a, b, strict=True):
        assert x is not None
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert with_gradient(LossConfig(kind=kind), compiled=False)(logits, targets, index, None)[1] is None


def test_under_autocast_the_gradient_is_no_farther_from_fp32_than_speculators(
    make_draft: MakeDraft, make_batch: MakeBatch
) -> None:
    ours, reference = 0.0, 0.0
    recorder = LossRecorder(lambda z, t: KL(z[0], t[0], torch.arange(z.shape[1]), None)[0][None])
    for seed in range(4):
        model = make_draft(seed=seed, scale=2.0)
        batch = make_batch((40, 24), supervised=0.6, seed=seed)
        expected = gradients(model, run(model, batch).loss_sums.sum())
        size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
        found = []
        for forward in (run, lambda m, b: ttt_forward(m, b, K, recorder)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(model, batch).loss_sums.sum()
            grads = gradients(model, loss)
            assert all(g.dtype == torch.float32 for g in grads.values())
            found.append(sum(float((grads[n] - e).square().sum()) for n, e in expected.items()) ** 0.5 / size)
        ours, reference = ours + found[0], reference + found[1]
    assert 0 < ours < 1.1 * reference < 0.4, (ours, reference)


def test_what_is_compiled_for_one_pack_serves_packs_of_any_size(
    make_draft: MakeDraft, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the inductor compiles; here the same tracing runs on another backend."""
    counters = torch._dynamo.utils.counters
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="aot_eager"))
    elementwise._compiled.cache_clear()
    try:
        model, loss = make_draft(), with_gradient(LossConfig(), compiled=True)
        graphs = 0
        for number, lengths in enumerate([(40, 24), (17,), (5, 50, 20), (90,)]):
            batch = make_batch(lengths, supervised=0.6, seed=number)
            expected = gradients(model, run(model, batch).loss_sums.sum())
            before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            output = pruned_forward(model, batch, K, loss, compiled=True)
            assert_close_gradients(gradients(model, output.loss_sums.sum()), expected)
            after = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            graphs = after[0] - before[0]
            assert after[1] == before[1]
            assert graphs > 10 if number == 0 else graphs == 0
    finally:
        elementwise._compiled.cache_clear()


def test_in_evaluation_nothing_is_differentiated(make_draft: MakeDraft, make_batch: MakeBatch) -> None:
    model, batch = make_draft(), make_batch((20,), supervised=0.5)
    expected = run(model, batch)
    for loss in (KL, with_gradient(LossConfig(kind=LossKind.tv), compiled=False)):
        with torch.inference_mode():
            output = pruned_forward(model, batch, K, loss, compiled=False)
        assert output.loss_sums.requires_grad is False
        assert torch.equal(output.draft_tokens, expected.draft_tokens)


def test_frozen_weights_shrink_only_where_they_stay_exact(
    make_draft: MakeDraft, make_batch: MakeBatch
) -> None:
    model, batch = make_draft(), make_batch((20,), supervised=0.5)
    with torch.no_grad():
        for parameter in (model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight):
            parameter.copy_(parameter.bfloat16())
    state = {n: t.clone() for n, t in model.state_dict().items()}
    expected = run(model, batch).loss_sums
    saved = shrink_frozen(model, torch.bfloat16)
    assert model.verifier_lm_head.weight is model.lm_head.weight
    assert model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.verifier_norm.weight.dtype == torch.float32  # its values would change
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    embedding, head = model.embed_tokens.weight.numel(), model.lm_head.weight.numel()
    assert saved == 2 * embedding + 6 * head
    assert torch.equal(run(model, batch).loss_sums, expected)
    widen_frozen(model)
    assert all(torch.equal(t, state[n]) and t.dtype == state[n].dtype for n, t in model.state_dict().items())


def test_a_draft_that_is_computed_otherwise_is_refused(make_draft: MakeDraft) -> None:
    model = make_draft(layer_type=LayerType.qwen3)
    check_prunable(model)
    model.config.transformer_layer_config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"draft\.step=reference"):
        check_prunable(model)
