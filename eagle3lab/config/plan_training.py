"""What a training run would need, from shapes alone: parameters, memory, tokens, disk, time. No torch, no device.

Units: GiB for device memory, GB (1e9) for disk and bandwidth. Speed is the needed work (`flops`) at
`hardware.assumed_mfu` of the peak, and the sum of the gradients over the devices once per update, as if it began when
the backward pass has ended: weights are used in every TTT step, so no gradient is ready before the last part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .flops import flops_per_token
from .plan_memory import training_gib
from .plan_sizes import DraftSize, StoreCounts, all_reduce_seconds, draft_size, stored_bytes_per_token
from .schema import DraftConfig, HardwareConfig, LastState, OptimConfig, Shapes, StoreDtype, TrainerConfig

TRAINING_SHARE = 0.95  # of a device's memory; the rest is the CUDA context's and the allocator's


@dataclass(frozen=True)
class TrainPlan:
    """Needs of a training run, per device unless said otherwise."""

    size: DraftSize
    num_devices: int  # over all nodes
    accumulate: int
    tokens_per_update: int
    num_updates: int | None  # None while neither the store nor `data.max_tokens` bounds them
    from_store: bool  # else from the most that the data may give it
    memory_gib: dict[str, float]
    device_memory_gib: float | None
    tokens_per_second: float | None  # all devices, at the assumed MFU
    exchange_share: float  # of the time, for the sum of the gradients over the devices
    disk_gb_per_second: float | None
    store_bytes_per_token: int
    hours: float | None

    @property
    def total_gib(self) -> float:
        return sum(self.memory_gib.values())

    @property
    def fits(self) -> bool:
        return self.device_memory_gib is None or self.total_gib <= TRAINING_SHARE * self.device_memory_gib


def plan_training(
    shapes: Shapes,
    draft: DraftConfig,
    hardware: HardwareConfig,
    train: TrainerConfig,
    *,
    num_aux: int,
    num_devices_per_node: int,
    store: StoreCounts | None,
    optim: OptimConfig | None = None,
    most_tokens: int | None = None,
) -> TrainPlan:
    """Plan a run. Without a store all tokens count as supervised, and as stored in bf16.

    most_tokens: that the store will hold, where the data bound it (`data.max_tokens`).
    """
    size = draft_size(draft, shapes, num_aux)
    devices = num_devices_per_node * hardware.num_nodes
    unit = train.seq_len * devices
    accumulate = max(1, (train.tokens_per_update or unit) // unit)
    tokens_per_update = unit * accumulate
    share = store.supervised_share if store else 1.0
    memory = training_gib(
        draft,
        shapes,
        hardware,
        train,
        optim,
        size=size,
        num_aux=num_aux,
        devices=devices,
        accumulate=accumulate,
        supervised_share=share,
    )
    exchange = all_reduce_seconds(size.trainable * 4, devices, hardware.link_gb_per_second)
    speed, exchange_share = None, 0.0
    if hardware.peak_tflops:
        flops = flops_per_token(draft, shapes, num_aux, supervised_share=share)
        computing = tokens_per_update * flops / (devices * hardware.peak_tflops * 1e12 * hardware.assumed_mfu)
        speed = tokens_per_update / (computing + exchange)
        exchange_share = exchange / (computing + exchange)
    store_dtype = store.dtype if store else StoreDtype.bfloat16
    # of supervised last states there is about one more per answer
    last_share = share if store and store.last_state is LastState.supervised else 1.0
    store_bytes = stored_bytes_per_token(shapes.hidden_size, num_aux, store_dtype, last_share)
    updates = _num_updates(train, store.num_tokens if store else most_tokens, tokens_per_update)
    return TrainPlan(
        size=size,
        num_devices=devices,
        accumulate=accumulate,
        tokens_per_update=tokens_per_update,
        num_updates=updates,
        from_store=store is not None,
        memory_gib=memory,
        device_memory_gib=hardware.device_memory_gib,
        tokens_per_second=speed,
        exchange_share=exchange_share,
        disk_gb_per_second=speed * store_bytes / 1e9 if speed else None,
        store_bytes_per_token=store_bytes,
        hours=updates * tokens_per_update / speed / 3600 if speed and updates else None,
    )


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
