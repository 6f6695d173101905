"""The verifier's embedding, head and final norm, read by name from its checkpoint, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from eagle3lab.config.errors import IntegrityError, Problem, UserError, raise_all
from eagle3lab.verifier.checkpoint import TensorEntry, tensor_index
from eagle3lab.verifier.facts import VerifierFacts

PARTS = ("embedding", "head", "norm")

_TEXT_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "thinker.model.",
    "",
)
_HEAD_PREFIXES = ("", "language_model.", "model.", "model.language_model.", "thinker.")

# Exact names only: a search by suffix would also find the copies inside multi-token-prediction layers.
_NAMES = {
    "embedding": tuple(f"{p}embed_tokens.weight" for p in _TEXT_PREFIXES),
    "head": tuple(f"{p}lm_head.weight" for p in _HEAD_PREFIXES),
    "norm": tuple(f"{p}norm.weight" for p in _TEXT_PREFIXES),
}
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_QUANTISED_SUFFIXES = ("_packed", "_scale", "_scale_inv", "_zero_point", "_shape")
_QUANTISED_NAMES = ("qweight", "qzeros", "scales", "weight_blocks", "weight_scales")


@dataclass(frozen=True)
class EdgeWeights:
    """The parts asked for, the others None. `norm` is a plain RMSNorm weight: any offset is added already.

    With tied embeddings `head` is the embedding tensor itself, not a copy.
    """

    embedding: Tensor | None  # shape: [vocab_size, hidden_size]
    head: Tensor | None  # shape: [vocab_size, hidden_size]
    norm: Tensor | None  # shape: [hidden_size]


def load_edge_weights(
    facts: VerifierFacts, *, parts: Collection[str] = PARTS, dtype: torch.dtype = torch.float32
) -> EdgeWeights:
    """Read `parts` of the checkpoint in `facts.path`, on the CPU, as `dtype`; other tensors stay on disk.

    The norm's offset (gemma's 1 + w) is added in fp32 before the cast. Raises `UserError` where a part is
    missing, quantised, held under two names or of another shape than config.json says, `IntegrityError` where a
    file is damaged.
    """
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise ValueError(f"unknown parts {sorted(unknown)}; known: {PARTS}")
    held = tensor_index(facts.path)
    problems: list[Problem] = []
    found = {part: _find(held, part, facts, problems) for part in PARTS if part in parts}
    tied_head = facts.tie_word_embeddings and "head" in found
    own_head = found.pop("head") if tied_head else None
    if tied_head and "embedding" not in found:
        found["embedding"] = _find(held, "embedding", facts, problems)
    raise_all(problems)

    tensors = {part: _read(entry) for part, entry in found.items() if entry is not None}
    if own_head is not None and not torch.equal(_read(own_head), tensors["embedding"]):
        raise UserError(
            Problem(
                f"{facts.path} ties its embeddings but holds a head that differs from the embedding",
                own_head.name,
                "one of the two",
                '"tie_word_embeddings": false in its config.json, if the head is the right one',
            )
        )
    if "norm" in tensors:
        tensors["norm"] = tensors["norm"].float() + facts.norm_offset
    tensors = {part: tensor.to(dtype) for part, tensor in tensors.items()}
    return EdgeWeights(
        embedding=tensors.get("embedding") if "embedding" in parts else None,
        head=tensors["embedding"] if tied_head else tensors.get("head"),
        norm=tensors.get("norm"),
    )


def final_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32, cast back to `hidden`'s dtype; [..., hidden_size]."""
    values = hidden.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * weight.float()).to(hidden.dtype)


def verifier_logits(last_hidden: Tensor, edge: EdgeWeights, eps: float) -> Tensor:
    """The verifier's own next-token logits from its pre-norm last state: final norm, then head.

    `last_hidden` [..., hidden_size] -> [..., vocab_size], in the head's dtype.
    """
    if edge.head is None or edge.norm is None:
        raise ValueError("verifier_logits needs the parts head and norm")
    normed = final_norm(last_hidden.to(edge.head.dtype), edge.norm, eps)
    return linear(normed, edge.head)


def _find(
    held: Mapping[str, TensorEntry], part: str, facts: VerifierFacts, problems: list[Problem]
) -> TensorEntry | None:
    """The one entry of `part`; None with a problem appended, or for the absent head of tied embeddings."""
    names = [name for name in _NAMES[part] if name in held]
    if len(names) > 1:
        problems.append(Problem(f"{facts.path} holds two tensors for the {part}", ", ".join(names), "one"))
        return None
    if not names:
        if part != "head" or not facts.tie_word_embeddings:
            problems.append(_missing(held, part, facts))
        return None
    entry = held[names[0]]
    bias = entry.name.removesuffix("weight") + "bias"
    if bias in held:
        problems.append(Problem(f"the verifier's {part} has a bias, which is not supported", bias))
    if entry.dtype not in _PLAIN_DTYPES:
        problems.append(_quantised(part, f"{entry.name} is {entry.dtype}"))
    expected = (facts.hidden_size,) if part == "norm" else (facts.vocab_size, facts.hidden_size)
    if entry.shape != expected:
        padded = part != "norm" and entry.shape[1:] == expected[1:]
        problems.append(
            Problem(
                f"{entry.name} of {facts.path} has shape",
                list(entry.shape),
                f"{list(expected)}, as its config.json says",
                f'"vocab_size": {entry.shape[0]} in its config.json (padded rows are part of the vocabulary)'
                if padded
                else "a checkpoint that belongs to this config.json",
            )
        )
    return entry


def _missing(held: Mapping[str, TensorEntry], part: str, facts: VerifierFacts) -> Problem:
    """Why no tensor was found: quantised, or which names look alike."""
    stems = {name.removesuffix("weight") for name in _NAMES[part]}
    for name in sorted(held):
        for stem in stems:
            rest = name.removeprefix(stem)
            if name.startswith(stem) and (rest.endswith(_QUANTISED_SUFFIXES) or rest in _QUANTISED_NAMES):
                return _quantised(part, f"{facts.path} holds {name}")
    word = _NAMES[part][0].split(".")[-2]
    alike = [name for name in held if word in name and ".layers." not in name]
    fix = "a complete checkpoint: model.path=..."
    if part == "head":
        fix = '"tie_word_embeddings": true in its config.json, if its head is its embedding'
    expected = "that tensor, or it under a known prefix"
    if alike:
        expected += f"; similar ones: {', '.join(sorted(alike)[:4])}"
    return Problem(f"{facts.path} has no {part}", _NAMES[part][0], expected, fix)


def _quantised(part: str, value: str) -> Problem:
    return Problem(
        f"the verifier's {part} is quantised",
        value,
        "embedding, head and final norm in bf16, fp16 or fp32 (quantised layers between them are fine)",
        "a checkpoint whose quantisation leaves lm_head and embed_tokens alone",
    )


def _read(entry: TensorEntry) -> Tensor:
    try:
        with safe_open(entry.file, framework="pt", device="cpu") as file:
            return file.get_tensor(entry.name)
    except SafetensorError as error:  # a header that can be read and describes other bytes
        raise IntegrityError(Problem(f"{entry.file} is damaged", str(error))) from error
