from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3lab.config.schema import Accelerator, TrainRoot
from eagle3lab.doctor import resources
from eagle3lab.doctor.check import Check, Status
from eagle3lab.doctor.devices import check_devices, describe_topology
from eagle3lab.doctor.resources import check_resources, main_memory

Usage = namedtuple("Usage", "total used free")
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-15\t0\nGPU1\tNV18\t X \tSYS\t0-15\t0\nGPU2\tSYS\tSYS\t X \t16-31\t1\n"
    "\nLegend:\n\n  X    = Self\n"
)


@pytest.fixture
def small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    small = Usage(2**20, 2**19, 2**19)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: small if Path(path) == resources.SHARED_MEMORY else real(path)
    )


def test_a_healthy_disk_and_memory_are_measured(tmp_path: Path, named: Callable[..., Check]) -> None:
    checks = list(check_resources(tmp_path / "not" / "there", num_processes=1, disk_mib=2))
    assert [c.name for c in checks] == ["shared memory", "main memory", "disk"]
    assert "MB/s with fsync" in named(checks, "disk").found
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_shm")
@pytest.mark.parametrize(("num_processes", "status"), [(1, Status.warn), (8, Status.fail)])
def test_a_tiny_shared_memory_is_named_with_its_remedy(
    num_processes: int, status: Status, tmp_path: Path, named: Callable[..., Check]
) -> None:
    check = named(list(check_resources(tmp_path, num_processes=num_processes, disk_mib=1)), "shared memory")
    assert check.status is status
    assert f"{num_processes} process(es) need" in check.found
    assert "--shm-size" in check.remedy


def test_a_place_that_cannot_be_written_to_fails(tmp_path: Path, named: Callable[..., Check]) -> None:
    (tmp_path / "file").write_text("")
    check = named(list(check_resources(tmp_path / "file" / "x", num_processes=1, disk_mib=1)), "disk")
    assert check.status is Status.fail
    assert "outputs=" in check.remedy


def test_a_control_groups_limit_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_group_limit", lambda: 2**30)
    finding = main_memory()
    assert not isinstance(finding, str)
    assert finding.status is Status.warn
    assert "1.0 GiB left of this control group" in finding.found


def test_devices_that_are_not_there_are_named(cfg: TrainRoot) -> None:
    hardware = dataclasses.replace(
        cfg.hardware, name="blackwell8", accelerator=Accelerator.cuda, num_devices=64
    )
    check = next(check_devices(hardware))
    assert check.status is Status.fail
    assert "hardware=auto" in check.remedy


def test_links_between_devices_are_counted_by_kind() -> None:
    assert describe_topology(TOPOLOGY) == "1 pair(s) NV18, 2 pair(s) SYS"
