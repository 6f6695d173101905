"""What `hardware=auto` decides where it finds a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.schema import Accelerator, HardwareConfig, Precision
from eagle3lab.engines.devices import resolve_hardware


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA Something", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)


def test_auto_takes_the_gpu_in_bf16_compiled_and_reads_packs_ahead(one_gpu: None) -> None:
    found = resolve_hardware(HardwareConfig(name="auto"))
    assert (found.accelerator, found.num_devices, found.precision) == (Accelerator.cuda, 1, Precision.bf16)
    assert found.compile
    assert found.num_loader_threads > 0
    assert (found.device_name, found.device_memory_gib) == ("NVIDIA Something", 80.0)


def test_auto_does_not_guess_a_peak(one_gpu: None) -> None:
    assert resolve_hardware(HardwareConfig(name="auto")).peak_tflops is None


def test_a_named_group_keeps_what_it_says(one_gpu: None) -> None:
    named = HardwareConfig(name="gpu1", accelerator=Accelerator.cuda, num_devices=1, num_loader_threads=4)
    found = resolve_hardware(named)
    assert (found.num_loader_threads, found.precision, found.compile) == (4, Precision.fp32, False)
