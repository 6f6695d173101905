"""What a run would need, from shapes alone: parameters, memory, tokens, disk, time. No torch, no device.

Units: GiB for device memory, GB (1e9) for disk and bandwidth. The activation formula is the one of
speculators' own training forward, fitted to its measured peak (16.1 GiB at K=3 and 27.6 GiB at K=7 for
hidden 4096, ffn 12288, draft vocabulary 32000, packs of 8192 in bf16 on one H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from .schema import DraftConfig, HardwareConfig, Precision, Shapes, StoreDtype, TrainerConfig

GIB = 2**30


@dataclass(frozen=True)
class DraftSize:
    """Parameters of the draft: `trainable`, and `frozen` (embedding, both heads, final norm)."""

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
    trainable = num_aux * h * h + first + (draft.num_layers - 1) * later + norms
    return DraftSize(trainable, shapes.vocab_size * h + 2 * vocab * h + h, vocab)


def flops_per_token(draft: DraftConfig, shapes: Shapes, num_aux: int, doc_len: int = 1024) -> float:
    """FLOPs that one pack position costs the unpruned step: forward and backward, heads without weight gradient."""
    size = draft_size(draft, shapes, num_aux)
    k = draft.ttt_steps
    fc = num_aux * shapes.hidden_size**2
    head = 2 * shapes.hidden_size * size.vocab_size
    q = (draft.num_heads or shapes.num_heads) * (draft.head_dim or shapes.head_dim)
    attention = draft.num_layers * k * 4 * q * (doc_len / 2) * 3.5
    return 6 * (fc + k * (size.trainable - fc)) + 2 * k * head + head + attention


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
    store_tokens: int | None,
) -> TrainPlan:
    """Plan a run; `store_tokens` are the training tokens of the store when it exists."""
    size = draft_size(draft, shapes, num_aux)
    devices = num_devices_per_node * hardware.num_nodes
    unit = train.seq_len * devices
    accumulate = max(1, (train.tokens_per_update or unit) // unit)
    tokens_per_update = unit * accumulate
    bytes_per_state = 2 if hardware.precision is Precision.bf16 else 4
    per_token_step = size.vocab_size * 3 * bytes_per_state + bytes_per_state * (
        4 * (draft.intermediate_size or shapes.intermediate_size) + 12 * shapes.hidden_size
    )
    batch = train.seq_len * (num_aux + 1) * shapes.hidden_size * bytes_per_state
    memory = {
        "trainable weights (fp32)": size.trainable * 4 / GIB,
        "gradients (fp32)": size.trainable * 4 / GIB,
        "optimizer states (fp32)": size.trainable * 8 / GIB,
        "frozen embedding and heads": size.frozen * 4 / GIB,
        "activations": (
            draft.ttt_steps * train.seq_len * per_token_step
            + size.vocab_size * train.seq_len * bytes_per_state
        )
        / GIB,
        "batches in flight": 2 * batch / GIB,
    }
    speed = None
    if hardware.peak_tflops:
        speed = (
            devices
            * hardware.peak_tflops
            * 1e12
            * hardware.assumed_mfu
            / flops_per_token(draft, shapes, num_aux)
        )
    store_bytes = stored_bytes_per_token(shapes.hidden_size, num_aux)
    updates = _num_updates(train, store_tokens, tokens_per_update)
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


def _num_updates(train: TrainerConfig, store_tokens: int | None, tokens_per_update: int) -> int | None:
    limits = []
    if train.max_updates is not None:
        limits.append(train.max_updates)
    if train.max_tokens is not None:
        limits.append(train.max_tokens // tokens_per_update)
    if train.max_epochs is not None:
        if store_tokens is None:
            return min(limits) if limits else None
        limits.append(train.max_epochs * max(1, round(store_tokens / 0.97 / tokens_per_update)))
    return min(limits)


# bytes of a value, and of the scale that every state of a token carries
_STORED = {StoreDtype.bfloat16: (2, 0), StoreDtype.float32: (4, 0), StoreDtype.float8_e4m3: (1, 4)}


def stored_bytes_per_token(hidden_size: int, num_aux: int, dtype: StoreDtype = StoreDtype.bfloat16) -> int:
    """Bytes of one token in a store: the aux states, the last state, id (8) and mask (1)."""
    per_value, per_state = _STORED[dtype]
    return (num_aux + 1) * (hidden_size * per_value + per_state) + 9


@dataclass(frozen=True)
class ExtractPlan:
    """Needs of an extraction."""

    num_tokens: int | None
    disk_gb: float | None
    bytes_per_token: int
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
) -> ExtractPlan:
    """Plan an extraction; `num_tokens` where the data bound it (`data.max_tokens`)."""
    per_token = stored_bytes_per_token(shapes.hidden_size, num_layer_ids, dtype)
    active = shapes.num_active_parameters or shapes.num_parameters
    devices = num_devices_per_node * hardware.num_nodes
    speed = None
    if hardware.peak_tflops:
        speed = devices * hardware.peak_tflops * 1e12 * hardware.assumed_mfu / (2 * active)
    return ExtractPlan(
        num_tokens=num_tokens,
        disk_gb=num_tokens * per_token / 1e9 if num_tokens else None,
        bytes_per_token=per_token,
        weights_gib_per_device=shapes.num_parameters
        * shapes.bytes_per_parameter
        / hardware.engine.tensor_parallel
        / GIB,
        device_memory_gib=hardware.device_memory_gib,
        tokens_per_second=speed,
        write_gb_per_second=speed * per_token / 1e9 if speed else None,
        hours=num_tokens / speed / 3600 if speed and num_tokens else None,
    )
