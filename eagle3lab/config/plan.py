"""What a run would need, from shapes alone: parameters, memory, tokens, disk, time. No torch, no device.

Units: GiB for device memory, GB (1e9) for disk and bandwidth. The activation formula of the reference step is
fitted to its measured peak (16.1 GiB at K=3 and 27.6 GiB at K=7 for hidden 4096, ffn 12288, draft vocabulary
32000, packs of 8192 in bf16 on one H200); that of the pruned step counts what it keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .flops import flops_per_token
from .schema import (
    DraftConfig,
    HardwareConfig,
    LastState,
    OptimConfig,
    OptimKind,
    Precision,
    Shapes,
    StoreDtype,
    Strategy,
    TrainerConfig,
    TrainingStep,
)

GIB = 2**30


@dataclass(frozen=True)
class DraftSize:
    """Parameters of the draft: `trainable`, and `frozen` (embedding, final norm, heads that are not trained)."""

    trainable: int
    frozen: int
    vocab_size: int


def draft_size(draft: DraftConfig, shapes: Shapes, num_aux: int) -> DraftSize:
    """Count an Eagle3DraftModel's parameters from the shapes of its verifier."""
    h = shapes.hidden_size
    ffn = draft.intermediate_size or shapes.intermediate_size
    q = (draft.num_heads or shapes.num_heads) * (draft.head_dim or shapes.head_dim)
    kv = (draft.num_kv_heads or shapes.num_kv_heads) * (draft.head_dim or shapes.head_dim)
    vocab = min(draft.vocab_size or shapes.vocab_size, shapes.vocab_size)
    first = 2 * h * (q + 2 * kv) + q * h + 3 * h * ffn + 3 * h  # attention reads [embedding; state]
    later = h * (q + 2 * kv) + q * h + 3 * h * ffn + 2 * h
    norms = h + (num_aux * h if draft.fc_norm or draft.norm_before_fc else 0)
    own_head = vocab * h if draft.train_head else 0
    trainable = num_aux * h * h + first + (draft.num_layers - 1) * later + norms + own_head
    return DraftSize(trainable, shapes.vocab_size * h + 2 * vocab * h + h - own_head, vocab)


@dataclass(frozen=True)
class StoreCounts:
    """What a plan takes from a store that exists."""

    num_tokens: int
    supervised_share: float
    dtype: StoreDtype
    last_state: LastState = LastState.all

    @classmethod
    def read(cls, store: Path) -> StoreCounts | None:
        """From the manifest alone; None where there is no store yet."""
        manifest = store / "manifest.json"
        if not manifest.is_file():
            return None
        values = json.loads(manifest.read_text())
        tokens = int(values["num_tokens"])
        share = int(values["num_supervised"]) / max(tokens, 1)
        last_state = LastState(values.get("last_state_rows", LastState.all.value))
        return cls(tokens, share, StoreDtype(values["dtype"]), last_state)


@dataclass(frozen=True)
class TrainPlan:
    """Needs of a training run, per device unless said otherwise."""

    size: DraftSize
    num_devices: int  # over all nodes
    accumulate: int
    tokens_per_update: int
    num_updates: int | None  # None while the store does not exist
    memory_gib: dict[str, float]
    device_memory_gib: float | None
    tokens_per_second: float | None  # all devices, at the assumed MFU
    disk_gb_per_second: float | None
    store_bytes_per_token: int
    hours: float | None

    @property
    def total_gib(self) -> float:
        return sum(self.memory_gib.values())

    @property
    def fits(self) -> bool:
        return self.device_memory_gib is None or self.total_gib <= 0.95 * self.device_memory_gib


def plan_training(
    draft: DraftConfig,
    shapes: Shapes,
    hardware: HardwareConfig,
    train: TrainerConfig,
    *,
    num_aux: int,
    num_devices_per_node: int,
    store: StoreCounts | None,
    optim: OptimConfig | None = None,
) -> TrainPlan:
    """Plan a run. Without a store all tokens count as supervised, and as stored in bf16."""
    size = draft_size(draft, shapes, num_aux)
    devices = num_devices_per_node * hardware.num_nodes
    unit = train.seq_len * devices
    accumulate = max(1, (train.tokens_per_update or unit) // unit)
    tokens_per_update = unit * accumulate
    bytes_per_state = 2 if hardware.precision is Precision.bf16 else 4
    share = store.supervised_share if store else 1.0
    whole_head = shapes.vocab_size * shapes.hidden_size * bytes_per_state
    batch = train.seq_len * (num_aux + 1) * shapes.hidden_size * bytes_per_state
    memory = {
        **_trained_gib(size.trainable, devices, hardware.strategy, optim),
        "frozen embedding and heads": _frozen_bytes(draft, shapes, size, bytes_per_state) / GIB,
        "verifier's whole head, for validation": whole_head / GIB,
        "activations": _activation_bytes(draft, shapes, size, num_aux, train.seq_len, share, bytes_per_state)
        / GIB,
        "batches in flight": 2 * batch / GIB,
    }
    if train.acceptance.every_updates:  # on the first device, which must hold it
        own = (size.trainable + size.frozen) * bytes_per_state
        verifier = shapes.num_parameters * max(bytes_per_state, shapes.bytes_per_parameter)
        memory["verifier and a second draft, to decode with"] = (verifier + own) / GIB
    speed = None
    if hardware.peak_tflops:
        speed = (
            devices
            * hardware.peak_tflops
            * 1e12
            * hardware.assumed_mfu
            / flops_per_token(draft, shapes, num_aux, supervised_share=share)
        )
    store_dtype = store.dtype if store else StoreDtype.bfloat16
    # of supervised last states there is about one more per answer
    last_share = share if store and store.last_state is LastState.supervised else 1.0
    store_bytes = stored_bytes_per_token(shapes.hidden_size, num_aux, store_dtype, last_share)
    updates = _num_updates(train, store.num_tokens if store else None, tokens_per_update)
    return TrainPlan(
        size=size,
        num_devices=devices,
        accumulate=accumulate,
        tokens_per_update=tokens_per_update,
        num_updates=updates,
        memory_gib=memory,
        device_memory_gib=hardware.device_memory_gib,
        tokens_per_second=speed,
        disk_gb_per_second=speed * store_bytes / 1e9 if speed else None,
        store_bytes_per_token=store_bytes,
        hours=updates * tokens_per_update / speed / 3600 if speed and updates else None,
    )


def _frozen_bytes(draft: DraftConfig, shapes: Shapes, size: DraftSize, bytes_per_value: int) -> float:
    """The pruned step holds a bf16 verifier's in bf16 and equal heads once, the reference all in fp32."""
    if draft.step is TrainingStep.reference:
        return size.frozen * 4
    return (shapes.vocab_size + size.vocab_size) * shapes.hidden_size * bytes_per_value


def _activation_bytes(
    draft: DraftConfig,
    shapes: Shapes,
    size: DraftSize,
    num_aux: int,
    seq_len: int,
    share: float,
    bytes_per_value: int,
) -> float:
    """What a pack leaves for its backward pass; `share` of its positions is supervised."""
    h, ffn = shapes.hidden_size, draft.intermediate_size or shapes.intermediate_size
    if draft.step is TrainingStep.reference:
        per_token_step = bytes_per_value * (3 * size.vocab_size + 4 * ffn + 12 * h)
        return seq_len * (draft.ttt_steps * per_token_step + size.vocab_size * bytes_per_value)
    head_dim = draft.head_dim or shapes.head_dim
    q, kv = (
        n * head_dim for n in (draft.num_heads or shapes.num_heads, draft.num_kv_heads or shapes.num_kv_heads)
    )
    # operands of the products in the compute dtype, and the residual stream twice in fp32
    per_row = bytes_per_value * (2 * ffn + 4 * h + 3 * q + 2 * kv) + 8 * h
    row_steps = share * seq_len * draft.ttt_steps * draft.num_layers
    context = seq_len * (bytes_per_value * ((num_aux + 3) * h + 4 * kv) + (draft.num_layers - 1) * per_row)
    targets = share * seq_len * size.vocab_size * bytes_per_value
    return row_steps * per_row + context + targets + size.trainable * bytes_per_value


def _trained_gib(
    trainable: int, devices: int, strategy: Strategy, optim: OptimConfig | None
) -> dict[str, float]:
    """What a trained parameter takes: all fp32. FSDP2 keeps shards, and whole weights and gradients in a step."""
    one = trainable * 4 / GIB
    states = 1 if optim is not None and optim.kind is OptimKind.muon else 2  # norms have two, and are few
    average = 1 if optim is not None and optim.ema_decay is not None else 0
    share = 1 / devices if strategy is Strategy.fsdp2 else 1.0
    gathered = one if strategy is Strategy.fsdp2 else 0.0
    memory = {
        "trainable weights (fp32)": one * share + gathered,
        "gradients (fp32)": one * share + gathered,
        "optimizer states (fp32)": one * states * share,
        "averaged weights (fp32)": one * average * share,
    }
    return {part: gib for part, gib in memory.items() if gib}


def _num_updates(train: TrainerConfig, store_tokens: int | None, tokens_per_update: int) -> int | None:
    limits = []
    if train.max_updates is not None:
        limits.append(train.max_updates)
    if train.max_tokens is not None:
        limits.append(-(-train.max_tokens // tokens_per_update))  # the update that reaches it is made
    if train.max_epochs is not None:
        if store_tokens is None:
            return min(limits) if limits else None
        limits.append(
            train.max_epochs * max(1, round(store_tokens * train.data_share / 0.97 / tokens_per_update))
        )
    return min(limits)


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


@dataclass(frozen=True)
class ExtractPlan:
    """Needs of an extraction."""

    num_tokens: int | None
    disk_gb: float | None
    bytes_per_token: int
    min_bytes_per_token: int  # less where last states are kept only where supervised: if nothing is
    weights_gib_per_device: float
    device_memory_gib: float | None
    tokens_per_second: float | None
    write_gb_per_second: float | None
    hours: float | None

    @property
    def fits(self) -> bool:
        return self.device_memory_gib is None or self.weights_gib_per_device <= 0.9 * self.device_memory_gib


def plan_extraction(
    shapes: Shapes,
    hardware: HardwareConfig,
    *,
    num_layer_ids: int,
    num_devices_per_node: int,
    num_tokens: int | None,
    dtype: StoreDtype = StoreDtype.bfloat16,
    last_state: LastState = LastState.all,
) -> ExtractPlan:
    """Plan an extraction; `num_tokens` where the data bound it (`data.max_tokens`).

    How many tokens are supervised is not known before the data are read: bytes are those of all last states.
    """
    per_token = stored_bytes_per_token(shapes.hidden_size, num_layer_ids, dtype)
    least = 0.0 if last_state is LastState.supervised else 1.0
    active = shapes.num_active_parameters or shapes.num_parameters
    devices = num_devices_per_node * hardware.num_nodes
    speed = None
    if hardware.peak_tflops:
        speed = devices * hardware.peak_tflops * 1e12 * hardware.assumed_mfu / (2 * active)
    return ExtractPlan(
        num_tokens=num_tokens,
        disk_gb=num_tokens * per_token / 1e9 if num_tokens else None,
        bytes_per_token=per_token,
        min_bytes_per_token=stored_bytes_per_token(shapes.hidden_size, num_layer_ids, dtype, least),
        weights_gib_per_device=shapes.num_parameters
        * shapes.bytes_per_parameter
        / hardware.engine.tensor_parallel
        / GIB,
        device_memory_gib=hardware.device_memory_gib,
        tokens_per_second=speed,
        write_gb_per_second=speed * per_token / 1e9 if speed else None,
        hours=num_tokens / speed / 3600 if speed and num_tokens else None,
    )
