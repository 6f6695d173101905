from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import LayerType
from eagle3lab.draft.ttt import (
    LossRecorder,
    correct_over_full_vocabulary,
    simulated_acceptance_length,
    supervision_masks,
    ttt_forward,
)
from eagle3lab.draft.vocabulary import DraftVocabulary

K = 3
EPS = 1e-5


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + EPS).sqrt() * weight


def _rotate(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """x: [heads, head_dim]"""
    half = x.shape[1] // 2
    angle = position / theta ** (torch.arange(half) * 2 / x.shape[1])
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)


def by_hand(model: Any, batch: dict[str, Tensor], steps: int, heads: int = 4, kv_heads: int = 2) -> Tensor:
    """Summed KL per step, row by row: one llama layer written out, no masks and no library of models."""
    w = dict(model.named_parameters())
    at = "layers.0."
    aux, ids = batch["hidden_states"][0], batch["input_ids"][0].tolist()
    docs, pos = batch["document_ids"][0].tolist(), batch["position_ids"][0].tolist()
    size, dim = len(ids), w[at + "self_attn.q_proj.weight"].shape[0] // heads
    state = [w["fc.weight"] @ row for row in aux]
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    sums = []
    for k in range(steps):
        queries, residual = [], []
        keys.append([])
        values.append([])
        for j in range(size):
            token = ids[j + k] if j + k < size else 0
            e = _rms(w["embed_tokens.weight"][token], w[at + "input_layernorm.weight"])
            h = _rms(state[j], w[at + "hidden_norm.weight"])
            x = torch.cat([e, h])
            residual.append(h)
            queries.append(_rotate((w[at + "self_attn.q_proj.weight"] @ x).view(heads, dim), pos[j] + k))
            keys[k].append(_rotate((w[at + "self_attn.k_proj.weight"] @ x).view(kv_heads, dim), pos[j] + k))
            values[k].append((w[at + "self_attn.v_proj.weight"] @ x).view(kv_heads, dim))
        total = torch.zeros(())
        for j in range(size):
            seen = [(0, i) for i in range(j + 1) if docs[i] == docs[j] >= 0 or i == j]
            seen += [(step, j) for step in range(1, k + 1)]
            out = []
            for head in range(heads):
                group = head * kv_heads // heads
                scores = torch.stack([queries[j][head] @ keys[s][i][group] for s, i in seen]) / math.sqrt(dim)
                out.append(scores.softmax(0) @ torch.stack([values[s][i][group] for s, i in seen]))
            x = residual[j] + w[at + "self_attn.o_proj.weight"] @ torch.cat(out)
            y = _rms(x, w[at + "post_attention_layernorm.weight"])
            gate, up = w[at + "mlp.gate_proj.weight"] @ y, w[at + "mlp.up_proj.weight"] @ y
            state[j] = x + w[at + "mlp.down_proj.weight"] @ (silu(gate) * up)
            target = j + k
            if target < size and docs[target] == docs[j] >= 0 and batch["loss_mask"][0, target]:
                logits = w["lm_head.weight"] @ _rms(state[j], w["norm.weight"])
                last = _rms(batch["verifier_last_hidden_states"][0, target], w["verifier_norm.weight"])
                log_p = (w["verifier_lm_head.weight"] @ last).log_softmax(0)
                total = total + (log_p.exp() * (log_p - logits.log_softmax(0))).sum()
        sums.append(total)
    return torch.stack(sums)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(b[name].abs().max()) or 1.0
        assert float((a[name] - b[name]).abs().max()) / scale < tolerance, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_equal_a_loop_written_out_by_hand(
    attention: str, make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    model = make_draft(attention=attention)
    batch = make_batch((6, 1, 5), seq_len=14, supervised=0.7)
    output = ttt_forward(model, batch, K, recorder)
    expected = by_hand(model, batch, K)
    torch.testing.assert_close(output.loss_sums, expected, rtol=1e-5, atol=1e-5)
    weights = torch.tensor([1.0, 0.8, 0.64])
    ours = gradients(model, (output.loss_sums * weights).sum())
    assert_same_gradients(ours, gradients(model, (expected * weights).sum()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_layers": 2, "layer_type": LayerType.qwen3, "sliding_window": 4},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True},
    ],
)
def test_on_one_full_document_loss_and_gradients_equal_speculators(
    fields: dict[str, Any],
    make_draft: Callable[..., Any],
    make_batch: Callable[..., Any],
    recorder: LossRecorder,
) -> None:
    from speculators.losses import resolve_loss_config

    model = make_draft(**fields)
    batch = make_batch((24,), supervised=0.6)
    batch["loss_mask"][:, -1] = 1
    output = ttt_forward(model, batch, K, recorder)
    decay = torch.tensor([1.0, 0.7, 0.49])
    loss = (decay * output.loss_sums / output.num_supervised).sum()
    ours = gradients(model, loss)
    inputs = {k: v for k, v in batch.items() if k != "lengths"}
    config = resolve_loss_config("kl_div", "eager")
    _, reference, _ = model(**inputs, ttt_steps=K, ttt_step_loss_decay=0.7, loss_config=config)
    assert abs(loss.item() - reference.item()) <= 1e-5 * reference.item()
    assert_same_gradients(ours, gradients(model, reference))


def test_right_guesses_are_counted_as_speculators_counts_them(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    from speculators.losses import resolve_loss_config

    # Four tokens: chance alone makes chains of right guesses.
    model = make_draft(vocabulary=DraftVocabulary.from_ids([3, 50, 70, 99], 128))
    batch = make_batch((60,), supervised=0.8)
    output = ttt_forward(model, batch, K, recorder)
    inputs = {k: v for k, v in batch.items() if k != "lengths"}
    metrics = model(**inputs, ttt_steps=K, loss_config=resolve_loss_config("kl_div", "eager"))[2]
    # speculators counts targets of supervised positions whose start is supervised and whose chain holds.
    chain = output.supervised[0]
    for k in range(K):
        chain = chain & output.correct[k]
        num_right = int((chain & output.supervised[k]).sum())
        assert num_right == int(metrics[f"full_acc_{k}_sum"])
        assert num_right > 0


def test_every_trainable_weight_and_nothing_else_gets_a_gradient(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    model = make_draft()
    found = gradients(model, ttt_forward(model, make_batch((20,)), K, recorder).loss_sums.sum())
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}


def test_a_pack_gives_the_sum_of_its_documents(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    model = make_draft()
    pack = make_batch((9, 2, 7), seq_len=24)
    whole = ttt_forward(model, pack, K, recorder)
    sums, counts, start = torch.zeros(K), torch.zeros(K, dtype=torch.int64), 0
    for length in (9, 2, 7):
        part = {k: v[:, start : start + length] for k, v in pack.items() if k != "lengths"}
        alone = ttt_forward(model, part, K, recorder)
        sums += alone.loss_sums.detach()
        counts += alone.num_supervised
        assert torch.equal(whole.draft_tokens[0, start : start + length], alone.draft_tokens[0])
        start += length
    torch.testing.assert_close(whole.loss_sums.detach(), sums, rtol=1e-5, atol=1e-5)
    assert whole.num_supervised.tolist() == counts.tolist() == [18, 15, 12]


def test_nan_at_an_unsupervised_target_stays_there(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    model, batch = make_draft(), make_batch((16,), seq_len=20)
    batch["loss_mask"][:, :6] = 0
    clean = ttt_forward(model, batch, K, recorder)
    expected = gradients(model, clean.loss_sums.sum())
    batch["verifier_last_hidden_states"][0, [0, 5, 18]] = float("nan")
    dirty = ttt_forward(model, batch, K, recorder)
    assert torch.equal(clean.loss_sums, dirty.loss_sums)
    assert_same_gradients(gradients(model, dirty.loss_sums.sum()), expected, 1e-7)


def test_a_pack_without_supervision_has_zero_loss_and_zero_gradients(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    model, batch = make_draft(), make_batch((12,), supervised=0.0)
    output = ttt_forward(model, batch, K, recorder)
    assert output.loss_sums.tolist() == [0.0] * K
    assert output.num_supervised.tolist() == [0] * K
    assert all(not g.any() for g in gradients(model, output.loss_sums.sum()).values())


def test_a_compiled_forward_is_traced_once_and_gives_the_same(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    """speculators compiles its forward where CUDA is; here the same tracing runs on another backend."""
    from torch._dynamo.backends.debugging import aot_eager

    model, batch = make_draft(), make_batch((20,), seq_len=24, supervised=0.5)
    plain = ttt_forward(model, batch, 2, recorder)
    expected = gradients(model, plain.loss_sums.sum())
    graphs: list[int] = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return aot_eager(module, inputs)

    original = type(model)
    forward = torch.compile(original.forward, backend=counting)
    model.__class__ = type("Compiled", (original,), {"forward": forward})
    first = ttt_forward(model, batch, 2, recorder)
    torch.testing.assert_close(first.loss_sums, plain.loss_sums, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, first.loss_sums.sum()), expected)
    num_graphs = len(graphs)
    assert num_graphs > 0
    ttt_forward(model, make_batch((20,), seq_len=24, seed=1), 2, recorder).loss_sums.sum().backward()
    other = ttt_forward(model, make_batch((21,)), 2, recorder, compiled=False)
    assert other.num_supervised.tolist() == [21, 20]
    assert len(graphs) == num_graphs


def test_a_length_flex_attention_would_mask_wrongly_is_refused(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    with pytest.raises(UserError, match=r"train\.seq_len=128"):
        ttt_forward(make_draft(attention="flex"), make_batch((100,)), K, recorder)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_gives_the_loss_of_sdpa(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any], recorder: LossRecorder
) -> None:
    batch = make_batch((60, 50), seq_len=128, supervised=0.5)
    losses = []
    for attention in ("flex", "sdpa", "eager"):
        with torch.no_grad():
            losses.append(ttt_forward(make_draft(attention=attention), batch, K, recorder).loss_sums)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-4, atol=1e-4)


def test_masks_count_a_target_only_inside_its_start_positions_document() -> None:
    loss_mask = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    documents = torch.tensor([0, 0, 0, 1, 1, 2, -1])
    assert supervision_masks(loss_mask, documents, 3).int().tolist() == [
        [1, 1, 0, 1, 1, 1, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert supervision_masks(torch.tensor([1]), torch.tensor([0]), 3).sum() == 1


def test_full_vocabulary_counts_follow_the_chain_from_every_supervised_start() -> None:
    vocabulary = DraftVocabulary.from_ids([2, 5], 10)
    verifier_argmax = torch.tensor([5, 2, 9, 5, 2, 5])
    documents = torch.tensor([0, 0, 0, 0, 1, 1])
    loss_mask = torch.tensor([0, 1, 1, 1, 1, 1])
    draft_tokens = torch.tensor(
        [
            [1, 0, 1, 1, 0, 0],  # verifier ids 5 2 5 5 2 2
            [0, 0, 1, 1, 1, 0],  # compared one further: 2|2, 2|9, 5|5, border, 5|5
            [1, 1, 0, 0, 0, 0],  # two further: 5|9, 5|5
        ]
    )
    counts = correct_over_full_vocabulary(draft_tokens, vocabulary, verifier_argmax, documents, loss_mask)
    assert counts.totals.tolist() == [5, 4, 2]
    assert counts.correct.tolist() == [3, 3, 1]
    # Starts 1, 3, 4 are right; of them only 4 goes on inside its document and is right again.
    assert counts.prefix_correct.tolist() == [3, 1, 0]
    assert simulated_acceptance_length(counts.prefix_correct, counts.totals) == pytest.approx(1 + 4 / 5)


def test_a_perfect_draft_has_the_length_its_answers_allow() -> None:
    vocabulary = DraftVocabulary.full(10)
    argmax = torch.arange(8)
    draft_tokens = torch.stack([torch.roll(argmax, -k) for k in range(4)])
    counts = correct_over_full_vocabulary(
        draft_tokens, vocabulary, argmax, torch.zeros(8, dtype=torch.int64), torch.ones(8)
    )
    assert counts.prefix_correct.tolist() == counts.totals.tolist() == [8, 7, 6, 5]
    assert simulated_acceptance_length(counts.prefix_correct, counts.totals) == 1 + 26 / 8


def test_without_start_positions_the_length_is_not_a_number() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    assert math.isnan(simulated_acceptance_length(zeros, zeros))
