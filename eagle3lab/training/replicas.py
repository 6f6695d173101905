"""How many processes train, and how many packs each of them gives to one update."""

from __future__ import annotations

import os

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import HardwareConfig, TrainerConfig


def num_replicas(hardware: HardwareConfig) -> int:
    """Training processes over all nodes. `hardware` is resolved: `num_devices` is a number.

    Raises `UserError` when torchrun started another number of processes than `hardware` says.
    """
    assert hardware.num_devices is not None, "hardware must be resolved first"
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if started is not None and int(started) != hardware.num_devices:
        raise UserError(
            Problem(
                "torchrun started another number of processes on this node than hardware has devices",
                f"{started} processes, {hardware.num_devices} devices",
                "the same number",
                f"hardware.num_devices={started} hardware.strategy=ddp",
            )
        )
    return hardware.num_devices * hardware.num_nodes


def micro_batches_per_update(train: TrainerConfig, replicas: int) -> int:
    """Packs of each process in one update, from `tokens_per_update` (padding included).

    Raises `UserError` proposing the nearest values when the tokens are no whole number of packs per process.
    """
    unit = train.seq_len * replicas
    if train.tokens_per_update is None:
        return 1
    if train.tokens_per_update < unit or train.tokens_per_update % unit:
        low = train.tokens_per_update // unit * unit
        near = [value for value in (low, low + unit) if value]
        raise UserError(
            Problem(
                "train.tokens_per_update is no whole number of packs on every device",
                train.tokens_per_update,
                f"a multiple of {unit} (train.seq_len {train.seq_len} x {replicas} devices)",
                " or ".join(f"train.tokens_per_update={value}" for value in near),
            )
        )
    return train.tokens_per_update // unit
