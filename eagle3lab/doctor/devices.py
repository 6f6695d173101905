"""Layer 3, first half: the devices a run would get, their driver, and what connects them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial

from eagle3lab.config.schema import Accelerator, HardwareConfig

from .check import Check, Finding, examine, warn

LAYER = "machine"
GIB = 2**30
_AUTO = "hardware=auto, or a node with the devices that hardware names"
_BUILD = "a torch build with kernels for this device and driver: pip install torch for its CUDA version"
_DRIVER = "a driver that nvidia-smi can talk to; in a container: docker run --gpus all"


def check_devices(hardware: HardwareConfig) -> Iterator[Check]:
    """The devices that `hardware` (not yet resolved) asks for, a computation on each, driver, links."""
    yield examine(LAYER, "devices", partial(_devices, hardware), _AUTO)
    if hardware.accelerator is Accelerator.cpu:
        return
    import torch

    if not torch.cuda.is_available():
        return
    yield examine(LAYER, "computation", _compute, _BUILD)
    yield examine(LAYER, "driver", _driver, _DRIVER)
    if torch.cuda.device_count() > 1 and shutil.which("nvidia-smi"):
        yield examine(LAYER, "interconnect", _interconnect, _DRIVER)


def accelerator_here(hardware: HardwareConfig) -> Accelerator:
    """`cuda` or `cpu`: what `hardware` asks for as far as it is visible here."""
    import torch

    here = hardware.accelerator is not Accelerator.cpu and torch.cuda.is_available()
    return Accelerator.cuda if here else Accelerator.cpu


def num_processes(hardware: HardwareConfig) -> int:
    """Processes that a run starts on this node: one per device."""
    import torch

    if accelerator_here(hardware) is Accelerator.cuda:
        return hardware.num_devices or torch.cuda.device_count()
    return hardware.num_devices or 1


def _devices(hardware: HardwareConfig) -> str | Finding:
    import torch

    from eagle3lab.engines.devices import resolve_hardware

    resolved = resolve_hardware(hardware)
    if resolved.accelerator is Accelerator.cpu:
        return f"{resolved.num_devices} CPU process(es), {torch.get_num_threads()} threads each, torch {torch.__version__}"
    lines = []
    for index in range(resolved.num_devices or 1):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index} {properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, "
            f"compute {properties.major}.{properties.minor}"
        )
        expected = hardware.device_memory_gib
        if expected and total / GIB < 0.9 * expected:
            lines.append(f"hardware={hardware.name} counts on {expected:g} GiB")
            return warn("\n".join(lines), f"hardware.device_memory_gib={total / GIB:.0f}")
        if free < 0.8 * total:
            return warn("\n".join(lines), "end what else runs there (nvidia-smi lists it)")
    return "\n".join(lines)


def _compute() -> str:
    """A bf16 product on every device: a build without kernels for the device fails here and not in a run."""
    import torch

    for index in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, dtype=torch.bfloat16, device=f"cuda:{index}")
        if float((ones @ ones)[0, 0]) != 256.0:
            raise RuntimeError(f"cuda:{index} computes wrongly")
    return f"bf16 product right on {torch.cuda.device_count()} device(s), CUDA {torch.version.cuda}"


def _driver() -> str | Finding:
    if shutil.which("nvidia-smi") is None:
        return warn("nvidia-smi is not on the PATH: driver and links stay unknown", _DRIVER)
    text = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return f"driver {', '.join(sorted(set(text.split())))}"


def _interconnect() -> str:
    return describe_topology(_nvidia_smi("topo", "-m"))


def describe_topology(matrix: str) -> str:
    """`nvidia-smi topo -m` as counts of link kinds between pairs of GPUs.

    NV: NVLink; PIX, PXB, PHB: PCIe within one host bridge; NODE, SYS: across bridges or sockets.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    links = Counter(rows[i][1 + j] for i in range(len(rows)) for j in range(i + 1, len(rows)))
    if not links:
        raise ValueError("nvidia-smi topo -m names no pair of GPUs")
    return ", ".join(f"{count} pair(s) {kind}" for kind, count in sorted(links.items()))


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout
