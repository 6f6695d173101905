"""How many processes train, and how many packs each of them gives to one update."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import HardwareConfig, TrainerConfig
from eagle3lab.config.stamp import interactive_slurm

from .peers import meet

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


def num_replicas(hardware: HardwareConfig) -> int:
    """Training processes over all nodes. `hardware` is resolved: `num_devices` is a number.

    Raises `UserError` when torchrun or SLURM started another number of processes than `hardware` says, or when
    nothing started those of several nodes: the plan of the run would be made for ranks that do not exist.
    """
    assert hardware.num_devices is not None, "hardware must be resolved first"
    devices = hardware.num_devices
    launcher, on_node, in_all = _started()
    if not launcher and hardware.num_nodes > 1:
        raise UserError(
            Problem(
                "hardware.num_nodes: this command starts the processes of its own node alone",
                hardware.num_nodes,
                "torchrun on every node, or srun",
                f"torchrun --nnodes {hardware.num_nodes} --nproc_per_node {devices} --rdzv_id NAME "
                "--rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29400 train.py ..., or hardware.num_nodes=1",
            )
        )
    if not launcher and _number("WORLD_SIZE") not in (None, devices * hardware.num_nodes):
        raise UserError(
            Problem(
                "WORLD_SIZE is set, but neither by torchrun nor for the devices of hardware",
                _number("WORLD_SIZE"),
                f"{devices * hardware.num_nodes}",
                "torchrun --nproc_per_node DEVICES train.py ..., or unset WORLD_SIZE RANK",
            )
        )
    if on_node is not None and on_node != devices:
        raise UserError(
            Problem(
                f"{launcher} started another number of processes on this node than hardware has devices",
                f"{on_node} processes, {devices} devices",
                "the same number",
                f"hardware.num_devices={on_node} hardware.strategy=ddp",
            )
        )
    if in_all is not None and in_all != devices * hardware.num_nodes:
        nodes = f"{hardware.num_nodes} node{'s' if hardware.num_nodes > 1 else ''}"
        raise UserError(
            Problem(
                f"{launcher} started another number of processes than hardware has devices",
                f"{in_all} processes, {nodes} of {devices} device{'s' if devices > 1 else ''}",
                "the same number",
                f"hardware.num_nodes={in_all // devices}"
                if in_all % devices == 0
                else f"{devices} processes on every node",
            )
        )
    if launcher == "SLURM" and on_node is None and in_all != 1:
        raise UserError(
            Problem(
                "SLURM was told how many tasks to start, but not how many on each node",
                f"--ntasks={in_all}",
                "SLURM_NTASKS_PER_NODE in the environment",
                f"srun --nodes={hardware.num_nodes} --ntasks-per-node={devices}",
            )
        )
    return devices * hardware.num_nodes


def meet_others() -> None:
    """Find the other processes that torchrun or SLURM started; those of this command itself do not exist yet."""
    launcher, _, _ = _started()
    if launcher:
        from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

        meet_in(TorchElasticEnvironment() if launcher == "torchrun" else SLURMEnvironment())


def meet_in(environment: ClusterEnvironment) -> bool:
    """Find the other processes where Lightning's `environment` says that they are; see `peers.meet`."""
    if environment.world_size() == 1:  # SLURM does not say everything of a single task
        return False
    return meet(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        node=environment.node_rank(),
        local_rank=environment.local_rank(),
        address=environment.main_address,
        port=environment.main_port,
    )


def _started() -> tuple[str, int | None, int | None]:
    """Who started this process, and how many beside it: on this node and on all. torchrun may run inside SLURM."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return "torchrun", _number("LOCAL_WORLD_SIZE"), _number("WORLD_SIZE")
    if "SLURM_NTASKS" in os.environ and not interactive_slurm():
        return "SLURM", _number("SLURM_NTASKS_PER_NODE"), _number("SLURM_NTASKS")
    return "", None, None


def ranks_text(hardware: HardwareConfig) -> str:
    """How many processes train, who starts them, and what tells so."""
    launcher, _, _ = _started()
    count = num_replicas(hardware)
    if launcher:
        variables = "LOCAL_WORLD_SIZE" if launcher == "torchrun" else "SLURM_NTASKS"
        return f"world size {count}, started by {launcher} ({variables} is set)"
    why = "neither torchrun nor SLURM did"
    if interactive_slurm():
        why = f"SLURM_JOB_NAME={os.environ['SLURM_JOB_NAME']} is an interactive shell, which starts none"
    return f"world size {count}, started by this command ({why})"


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


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
