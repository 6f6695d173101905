"""Which devices a run gets: `hardware` held against what the machine has."""

from __future__ import annotations

import dataclasses
import os

import torch

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import Accelerator, Attention, HardwareConfig, Precision

GIB = 2**30
AUTO_LOADER_THREADS = 6  # deliver several hundred thousand tokens/s at hidden 4096


def resolve_hardware(hardware: HardwareConfig, *, require: bool = True) -> HardwareConfig:
    """`hardware` with every `auto` decided and the device's name and memory filled in.

    Raises `UserError` when the devices asked for are not there, unless `require` is false (a plan).
    """
    visible = torch.cuda.device_count()
    accelerator = hardware.accelerator
    if accelerator is Accelerator.auto:
        accelerator = Accelerator.cuda if visible else Accelerator.cpu
    num_devices = hardware.num_devices or (max(visible, 1) if accelerator is Accelerator.cuda else 1)
    if require and accelerator is Accelerator.cuda and visible < num_devices:
        raise UserError(
            Problem(
                f"hardware={hardware.name} needs {num_devices} CUDA device{'s' if num_devices > 1 else ''} on this "
                "node, visible here",
                visible,
                f"a node with {num_devices} x {hardware.device_name or 'GPU'}",
                "plan=true to only plan it, or hardware=auto to run on what is here",
            )
        )
    on_its_own = hardware.accelerator is Accelerator.auto and accelerator is Accelerator.cuda
    compiled = hardware.compile or on_its_own
    attention = hardware.attention
    if attention is Attention.auto:  # uncompiled flex holds all scores, so it is never chosen
        attention = Attention.flex if accelerator is Accelerator.cuda and compiled else Attention.sdpa
    precision = hardware.precision
    if on_its_own:
        precision = Precision.bf16
    resolved = dataclasses.replace(
        hardware,
        accelerator=accelerator,
        num_devices=num_devices,
        attention=attention,
        precision=precision,
        compile=compiled,
        num_loader_threads=hardware.num_loader_threads or (AUTO_LOADER_THREADS if on_its_own else 0),
    )
    if accelerator is Accelerator.cuda and visible:
        properties = torch.cuda.get_device_properties(0)
        resolved.device_name = hardware.device_name or properties.name
        resolved.device_memory_gib = hardware.device_memory_gib or properties.total_memory / GIB
    return resolved


def apply_environment(hardware: HardwareConfig) -> None:
    """Set the interconnect variables (what is set already wins) and the CPU thread count."""
    for name, value in hardware.environment.items():
        os.environ.setdefault(name, value)
    if hardware.num_threads:
        torch.set_num_threads(hardware.num_threads)
