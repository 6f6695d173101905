"""Random drafts and packs, from a seed, on which the pruned step is held against speculators' own forward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.config.schema import DraftConfig, LayerType, LossConfig, LossKind
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.pruned.plan import plan_pack
from eagle3lab.draft.pruned.step import pruned_forward
from eagle3lab.draft.pruned.unrolled import windows_of
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights

VOCAB = 128
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
]


@dataclass
class Case:
    """One draft, one pack, one loss."""

    text: str
    model: Any
    batch: dict[str, Tensor]
    ttt_steps: int
    loss: LossConfig
    token_weights: Tensor | None
    bucket: int
    max_target_bytes: int

    def __post_init__(self) -> None:
        self._rotary = copy.deepcopy(self.model.rotary_emb)

    def _forget(self) -> None:
        """The dynamic kind of RoPE remembers the longest pack it saw."""
        self.model.rotary_emb = copy.deepcopy(self._rotary)

    def pruned(self) -> TTTOutput:
        self._forget()
        plan = plan_pack(
            self.batch["document_ids"],
            self.batch["loss_mask"],
            self.ttt_steps,
            windows_of(self.model),
            bucket=self.bucket,
        )
        return pruned_forward(
            self.model,
            self.batch,
            self.ttt_steps,
            loss_and_gradient(self.loss, compiled=False),
            token_weights=self.token_weights,
            plan=plan,
            compiled=False,
            max_target_bytes=self.max_target_bytes,
        )

    def reference(self) -> TTTOutput:
        self._forget()
        recorder = LossRecorder(token_loss(self.loss))
        return ttt_forward(self.model, self.batch, self.ttt_steps, recorder, token_weights=self.token_weights)


def random_case(seed: int, facts: VerifierFacts, edge: EdgeWeights) -> Case:
    """The case of a seed, always the same."""
    r = random.Random(seed)
    rope = r.choice(ROPES)
    # a short horizon, so that the kinds of RoPE that depend on it do
    facts = replace(facts, rope_parameters=rope, max_positions=r.choice([32, 512]))
    fields: dict[str, Any] = {
        "num_layers": r.choice([1, 1, 2, 3]),
        "layer_type": r.choice(list(LayerType)),
        "sliding_window": r.choice([None, None, 1, 3, 8, 64]),
        "norm_before_residual": r.random() < 0.6,
        "norm_output": r.random() < 0.4,
        "num_heads": 4,
        "num_kv_heads": r.choice([1, 2, 4]),
    }
    fields[r.choice(["norm_before_fc", "fc_norm", "norm_output"])] = r.random() < 0.7
    ids = r.choice([range(0, VOCAB, 4), range(VOCAB), range(7, 100, 2)])
    whole = len(ids) == VOCAB
    vocabulary = DraftVocabulary.full(VOCAB) if whole else DraftVocabulary.from_ids(ids, VOCAB)
    aux = r.choice([(2, 4, 5), (1, 6), (1, 3, 5, 7)])
    cfg = DraftConfig(name="random", **fields)
    model = build_draft(cfg, facts, edge, vocabulary, aux, attention="sdpa", seed=seed)
    _spread(model, seed, bias=r.random() < 0.3)
    trainable_head = r.random() < 0.25
    model.lm_head.weight.requires_grad_(trainable_head)
    steps = r.randint(1, 7)
    loss = _random_loss(r)
    batch = _random_pack(r, facts.hidden_size, len(aux), at_least=steps)
    weights = None
    if r.random() < 0.3:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(steps, batch["input_ids"].shape[1], generator=generator)
    bucket = r.choice([1, 1, 8, 64])
    text = f"{seed}: {fields} {rope['rope_type']} {len(aux)} aux, {vocabulary.size} tokens, K={steps}, {loss}"
    return Case(text, model, batch, steps, loss, weights, bucket, r.choice([0, 1 << 20]))


@torch.no_grad()
def _spread(model: nn.Module, seed: int, *, bias: bool) -> None:
    """Weights large enough that every part shows in the loss, norms that are not 1, and perhaps biases."""
    g = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.mul_(5.0)
        elif parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
    draft: Any = model
    for layer in draft.layers if bias else []:
        for module in (layer.self_attn, layer.mlp):
            for linear in module.children():
                if isinstance(linear, nn.Linear):
                    linear.bias = nn.Parameter(torch.randn(linear.out_features, generator=g) * 0.3)


def _random_loss(r: random.Random) -> LossConfig:
    kind = r.choice([LossKind.kl, *LossKind])
    weights = {"kl": 0.7, "tv": 0.2, "ce": 0.1} if kind is LossKind.sum else {}
    return LossConfig(kind=kind, weights=weights)


def _random_pack(r: random.Random, hidden_size: int, num_aux: int, at_least: int) -> dict[str, Tensor]:
    lengths = [r.choice([1, 2, 3, r.randint(1, 40)]) for _ in range(r.randint(1, 6))]
    # speculators cannot unroll further than a pack is long
    padding = max(r.choice([0, 0, 1, 9]), at_least - sum(lengths))
    size = sum(lengths) + padding
    documents = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    positions = [p for n in lengths for p in range(1, n + 1)] + [0] * padding
    mask: list[int] = []
    density = r.choice([0.05, 0.2, 0.5, 0.9, 1.0])
    for n in lengths:
        style = r.choice(["random", "answer", "none", "all"])
        start = r.randint(0, n)
        mask += {
            "random": [int(r.random() < density) for _ in range(n)],
            "answer": [int(i >= start) for i in range(n)],
            "none": [0] * n,
            "all": [1] * n,
        }[style]
    mask += [0] * padding
    g = torch.Generator().manual_seed(r.randrange(1 << 30))
    return {
        "hidden_states": torch.randn(1, size, num_aux * hidden_size, generator=g),
        "input_ids": torch.randint(VOCAB, (1, size), generator=g),
        "document_ids": torch.tensor([documents]),
        "position_ids": torch.tensor([positions]),
        "loss_mask": torch.tensor([mask]),
        "verifier_last_hidden_states": torch.randn(1, size, hidden_size, generator=g) * 3,
    }


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of the trainable parameters that got one."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differences(case: Case) -> tuple[float, float]:
    """Relative differences of the losses and of the gradients, the worst of each, by largest elements.

    A gradient of less than a tenth of the largest counts as a tenth: some are 0 but for rounding.
    """
    ours, reference = case.pruned(), case.reference()
    decay = torch.tensor([0.8**k for k in range(case.ttt_steps)])
    found = gradients(case.model, (ours.loss_sums * decay).sum())
    expected = gradients(case.model, (reference.loss_sums * decay).sum())
    assert found.keys() == expected.keys(), case.text
    sizes = {name: float(value.abs().max()) for name, value in expected.items()}
    least = max(sizes.values()) / 10 or 1.0
    worst = max(
        float((found[name] - value).abs().max()) / max(sizes[name], least) for name, value in expected.items()
    )
    sums, expected_sums = ours.loss_sums.detach(), reference.loss_sums.detach()
    loss = float((sums - expected_sums).abs().max()) / (float(expected_sums.abs().max()) or 1.0)
    return loss, worst


def same_tokens(case: Case, check: Callable[[bool, str], None]) -> None:
    """What is counted: the guesses at supervised places, and where they are right."""
    with torch.no_grad():
        ours, reference = case.pruned(), case.reference()
    where = reference.supervised
    check(torch.equal(ours.supervised, where), "supervised")
    check(torch.equal(ours.num_supervised, reference.num_supervised), "num_supervised")
    check(torch.equal(ours.draft_tokens[where], reference.draft_tokens[where]), "draft_tokens")
    check(torch.equal(ours.correct & where, reference.correct & where), "correct")
    scale = float(reference.token_loss_sums.abs().max()) or 1.0
    apart = float((ours.token_loss_sums - reference.token_loss_sums).abs().max())
    check(apart / scale < 1e-5, "token_loss_sums")
