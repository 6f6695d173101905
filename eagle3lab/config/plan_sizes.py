"""What every plan counts with: a draft's widths and parameters, the bytes of a stored token, what a store says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import DAMAGED_JSON, IntegrityError, Problem
from .schema import DraftConfig, LastState, LayerType, Shapes, StoreDtype

GIB = 2**30


@dataclass(frozen=True)
class Widths:
    """Of a draft's layers: its own where it has them, else the verifier's."""

    hidden: int
    ffn: int
    queries: int  # of all heads
    keys: int  # of all key heads; the values are as wide
    vocab: int  # of the draft


def widths_of(draft: DraftConfig, shapes: Shapes) -> Widths:
    head_dim = draft.head_dim or shapes.head_dim
    num_heads = draft_heads(draft, shapes.hidden_size, shapes.num_heads, shapes.num_kv_heads)
    return Widths(
        hidden=shapes.hidden_size,
        ffn=draft.intermediate_size or shapes.intermediate_size,
        queries=num_heads * head_dim,
        keys=(draft.num_kv_heads or shapes.num_kv_heads) * head_dim,
        vocab=min(draft.vocab_size or shapes.vocab_size, shapes.vocab_size),
    )


def draft_heads(draft: DraftConfig, hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    """The draft's own number of heads, else that of its verifier, whose sizes the others are.

    transformers builds a llama layer only with a divisor of the hidden size, however wide a head is: where the
    verifier's is none, the next smaller one that the key heads divide, too (GLM-4.5-Air: 64 of 96 heads).
    """
    if draft.num_heads or draft.layer_type is not LayerType.llama or not hidden_size % num_heads:
        return draft.num_heads or num_heads
    keys = draft.num_kv_heads or num_kv_heads
    fitting = (n for n in range(num_heads, 0, -1) if not hidden_size % n and not n % keys)
    return next(fitting, num_heads)


def llama_heads(draft: DraftConfig, hidden_size: int, num_heads: int) -> Iterator[Problem]:
    """What is wrong with a draft's number of heads, see `draft_heads`."""
    if draft.layer_type is LayerType.llama and hidden_size % num_heads:
        yield Problem(
            "draft.num_heads does not divide the hidden size, as a llama layer needs",
            num_heads,
            f"a divisor of {hidden_size}",
            "draft.layer_type=qwen3",
        )


@dataclass(frozen=True)
class DraftSize:
    """Parameters of the draft: `trainable`, and `frozen` (embedding, final norm, heads that are not trained)."""

    trainable: int
    frozen: int
    vocab_size: int


def draft_size(draft: DraftConfig, shapes: Shapes, num_aux: int) -> DraftSize:
    """Count an Eagle3DraftModel's parameters from the shapes of its verifier."""
    w = widths_of(draft, shapes)
    h, q, kv = w.hidden, w.queries, w.keys
    first = 2 * h * (q + 2 * kv) + q * h + 3 * h * w.ffn + 3 * h  # attention reads [embedding; state]
    later = h * (q + 2 * kv) + q * h + 3 * h * w.ffn + 2 * h
    norms = h + (num_aux * h if draft.fc_norm or draft.norm_before_fc else 0)
    own_head = w.vocab * h if draft.train_head else 0
    trainable = num_aux * h * h + first + (draft.num_layers - 1) * later + norms + own_head
    return DraftSize(trainable, shapes.vocab_size * h + 2 * w.vocab * h + h - own_head, w.vocab)


@dataclass(frozen=True)
class StoreCounts:
    """What a plan takes from a store that exists."""

    num_tokens: int
    supervised_share: float
    dtype: StoreDtype
    last_state: LastState = LastState.all

    @classmethod
    def read(cls, store: Path) -> StoreCounts | None:
        """From the manifest alone; None where there is no store yet. Raises IntegrityError where it is damaged."""
        manifest = store / "manifest.json"
        if not manifest.is_file():
            return None
        try:
            values = json.loads(manifest.read_text(encoding="utf-8"))
            tokens = int(values["num_tokens"])
            share = int(values["num_supervised"]) / max(tokens, 1)
            last_state = LastState(values.get("last_state_rows", LastState.all.value))
            return cls(tokens, share, StoreDtype(values["dtype"]), last_state)
        except DAMAGED_JSON as error:
            raise IntegrityError(Problem(f"{manifest} is not the manifest of a store ({error})")) from error


# bytes of a value, and of the scale that every state of a token carries
_STORED = {StoreDtype.bfloat16: (2, 0), StoreDtype.float32: (4, 0), StoreDtype.float8_e4m3: (1, 4)}


def stored_bytes_per_token(
    hidden_size: int, num_aux: int, dtype: StoreDtype = StoreDtype.bfloat16, last_share: float = 1.0
) -> int:
    """Bytes of one token in a store: the aux states, the last state, id (8) and mask (1).

    last_share: of the tokens that have a last state.
    """
    per_value, per_state = _STORED[dtype]
    return round((num_aux + last_share) * (hidden_size * per_value + per_state)) + 9


def all_reduce_seconds(num_bytes: float, devices: int, link_gb_per_second: float | None) -> float:
    """Of a sum over `devices`, at a ring's bus bandwidth: every device sends 2 (n - 1) / n of the bytes.

    link_gb_per_second: as nccl-tests report `busbw`; 0 s where it is not known or there is one device.
    """
    if devices == 1 or not link_gb_per_second:
        return 0.0
    return num_bytes * 2 * (devices - 1) / devices / (link_gb_per_second * 1e9)
