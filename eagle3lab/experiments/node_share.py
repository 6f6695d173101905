"""Several trials on one node: which of its devices are this process's, and how much of the rest.

joblib starts the processes, as many as `hardware.trials_per_node`, and gives each its share of the CPU's threads
(OMP_NUM_THREADS). What it does not know is which process gets which GPUs: that is settled here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import Accelerator, HardwareConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
_slot: tuple[int, FileLock] | None = None  # of this process, for as long as it lives
_on_each_device = 1  # trials


def share_of_node(
    hardware: HardwareConfig, sweep_dir: Path, visible_gpus: Callable[[], int]
) -> HardwareConfig:
    """`hardware` as one of `trials_per_node` trials has it; sets CUDA_VISIBLE_DEVICES to its devices.

    The devices are the process's, not the trial's: once CUDA has started, a process keeps those it saw, and
    joblib's processes run one trial after the other. A multiple of the devices shares each of them, and its
    memory. Loader threads are at most the process's cores.

    Raises UserError when the node's devices cannot be shared evenly.
    """
    global _on_each_device
    trials = hardware.trials_per_node
    if trials == 1:
        return hardware
    cores = max(1, len(os.sched_getaffinity(0)) // trials)
    if hardware.accelerator is Accelerator.cpu:
        return dataclasses.replace(hardware, num_loader_threads=min(hardware.num_loader_threads, cores))
    if _slot is None:
        visible = visible_gpus()
        if not visible:  # hardware=auto on a machine without GPUs
            return dataclasses.replace(hardware, num_loader_threads=min(hardware.num_loader_threads, cores))
        devices = hardware.num_devices or visible
        if devices > visible or (devices % trials and trials % devices):
            raise UserError(
                Problem(
                    "hardware.trials_per_node does not share the node's GPUs evenly",
                    f"{trials} trials, {devices} GPUs of {visible} visible",
                    "a divisor of the number of GPUs, or a multiple: several trials on each",
                    f"hardware.trials_per_node={min(devices, visible)}",
                )
            )
        given = os.environ.get(VISIBLE, "")
        names = given.split(",") if given else [str(i) for i in range(visible)]
        slot = _take_slot(sweep_dir, trials)
        each, _on_each_device = max(1, devices // trials), max(1, trials // devices)
        first = slot * each % devices
        os.environ[VISIBLE] = ",".join(names[first : first + each])
    each = len(os.environ[VISIBLE].split(","))
    threads = min(hardware.num_loader_threads, max(1, cores // each)) if hardware.num_loader_threads else 0
    memory = hardware.device_memory_gib
    if memory is not None:
        memory /= _on_each_device
    return dataclasses.replace(
        hardware, num_devices=each, num_loader_threads=threads, device_memory_gib=memory
    )


def _take_slot(sweep_dir: Path, num_slots: int) -> int:
    """The first free number below `num_slots` on this node, kept until this process ends."""
    global _slot
    name = hashlib.sha256(str(sweep_dir).encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"eagle3lab-{os.getuid()}-{name}"
    directory.mkdir(exist_ok=True)
    while True:
        for number in range(num_slots):
            lock = FileLock(directory / f"{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            _slot = number, lock
            return number
        time.sleep(1.0)  # a process that ended is about to let go
