"""Layer 3, second half: shared memory, main memory, and the disk that runs and stores are written to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .check import Check, Finding, examine, fail, warn

LAYER = "machine"
SHARED_MEMORY = Path("/dev/shm")
MIB, GIB = 2**20, 2**30
# NCCL's guide asks for 1 GiB; an engine's worker processes pass their messages through it too.
SHARED_MIB_SEVERAL_PROCESSES = 1024
SHARED_MIB_ONE_PROCESS = 64  # what containers get by default
LEAST_RAM_GIB = 4.0
LEAST_FREE_GIB = 2.0
LEAST_MB_PER_SECOND = 50.0
_SHM_REMEDY = "docker run --ipc=host or --shm-size=16g; as root: mount -o remount,size=16g /dev/shm"
_DISK_REMEDY = "outputs=DIRECTORY and store=DIRECTORY on a local disk"
_RAM_REMEDY = "a machine or a job allocation with more memory (SLURM: --mem)"


def check_resources(directory: Path, *, num_processes: int, disk_mib: int) -> Iterator[Check]:
    """`directory`: where output would go; `num_processes` on this node; `disk_mib`: bytes of the disk test."""
    yield examine(LAYER, "shared memory", partial(shared_memory, num_processes), _SHM_REMEDY)
    yield examine(LAYER, "main memory", main_memory, _RAM_REMEDY)
    yield examine(LAYER, "disk", partial(disk, directory, disk_mib), _DISK_REMEDY)


def shared_memory(num_processes: int) -> str | Finding:
    if not SHARED_MEMORY.is_dir():
        return "no /dev/shm on this system"
    usage = shutil.disk_usage(SHARED_MEMORY)
    several = num_processes > 1
    needed = SHARED_MIB_SEVERAL_PROCESSES if several else SHARED_MIB_ONE_PROCESS
    found = f"/dev/shm: {usage.free / MIB:,.0f} of {usage.total / MIB:,.0f} MiB free"
    if usage.free >= needed * MIB:
        return found
    found += f", {num_processes} process(es) need {needed}"
    return fail(found, _SHM_REMEDY) if several else warn(found, _SHM_REMEDY)


def main_memory() -> str | Finding:
    """What may still be allocated: the kernel's estimate, or the control group's limit where lower."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    found = f"{available / GIB:.1f} GiB available"
    limit = _group_limit()
    if limit is not None and limit < available:
        available = limit
        found = f"{limit / GIB:.1f} GiB left of this control group's limit"
    return found if available >= LEAST_RAM_GIB * GIB else warn(found, _RAM_REMEDY)


def _group_limit() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        current = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - current)


def disk(directory: Path, size_mib: int) -> str | Finding:
    """Write, fsync and read `size_mib` MiB of random bytes under `directory`, or its nearest parent."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return fail(f"{place} is no directory that can be written to", _DISK_REMEDY)
    free = shutil.disk_usage(place).free
    if free < size_mib * MIB + 64 * MIB:
        return fail(f"{place}: {free / MIB:,.0f} MiB free", _DISK_REMEDY)
    block = os.urandom(MIB)  # a compressing or deduplicating disk must not be flattered by zeros
    with tempfile.NamedTemporaryFile(dir=place, prefix=".eagle3lab-doctor-") as file:
        start = time.perf_counter()
        for number in range(size_mib):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
        file.seek(0)
        start = time.perf_counter()
        same = all(file.read(MIB) == number.to_bytes(8, "little") + block[8:] for number in range(size_mib))
        read_seconds = time.perf_counter() - start
    if not same:
        return fail(f"{place} gave back other bytes than were written", "another disk: this one loses data")
    write, read = (size_mib * MIB / 1e6 / seconds for seconds in (write_seconds, read_seconds))
    found = f"{place}: write {write:,.0f} MB/s with fsync, read {read:,.0f} MB/s, {free / GIB:,.1f} GiB free"
    slow = min(write, read) < LEAST_MB_PER_SECOND
    return warn(found, _DISK_REMEDY) if slow or free < LEAST_FREE_GIB * GIB else found
