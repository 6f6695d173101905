"""One stamp for all ranks and jobs of a command, so that they agree on the run directory."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

STAMP_VARIABLE = "EAGLE3LAB_STAMP"


def run_stamp() -> str:
    """The stamp of this command: from the environment, a scheduler's id, else the time; exported on first use.

    Ranks started by this process inherit it. Ranks started by torchrun or SLURM find the launcher's id,
    which is also the same after a requeue.
    """
    stamp = os.environ.get(STAMP_VARIABLE)
    if not stamp:
        stamp = _launcher_stamp() or datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3] + f"-{os.getpid()}"
        os.environ[STAMP_VARIABLE] = stamp
    return stamp


def _launcher_stamp() -> str | None:
    job = os.environ.get("SLURM_JOB_ID")
    if job and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"slurm-{os.environ.get('SLURM_ARRAY_JOB_ID') or job}_{task}" if task else f"slurm-{job}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id:
        # a default id ("none") repeats; the agent, parent of every rank of a node, does not
        agent = f"-{os.getppid()}-{_start_ticks(os.getppid())}"
        return f"torchrun-{run_id}" + (agent if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else "")
    return None


def _start_ticks(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def is_rank_zero() -> bool:
    """True in the process that writes: read from the environment, valid before any process group exists."""
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        value = _number(variable)
        if value is not None and not (variable == "SLURM_PROCID" and interactive_slurm()):
            return value == 0 and os.environ.get("NODE_RANK", "0") == "0"
    return True


def launched_by() -> list[str]:
    """The words that started this process and those beside it, on every node the same."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        nodes = environment.get("GROUP_WORLD_SIZE", "1")
        words = ["torchrun", "--nnodes", nodes, "--nproc_per_node", environment.get("LOCAL_WORLD_SIZE", "1")]
        if nodes == "1":
            return words
        place = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        run_id = environment["TORCHELASTIC_RUN_ID"]
        return [*words, "--rdzv_id", run_id, "--rdzv_backend", "c10d", "--rdzv_endpoint", place]
    if environment.get("SLURM_NTASKS", "1") != "1" and not interactive_slurm():
        return ["srun", "--kill-on-bad-exit=1", "python"]
    return ["python"]


def local_rank() -> int:
    """This process's number among those of its node."""
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        value = _number(variable)
        if value is not None and not (variable == "SLURM_LOCALID" and interactive_slurm()):
            return value
    return 0


def _number(variable: str) -> int | None:
    """None also for what is no number: `launcher_problems` says so, once."""
    value = os.environ.get(variable, "").strip()
    return int(value) if value.isascii() and value.isdigit() else None


def interactive_slurm() -> bool:
    """True in a shell that SLURM gave, where it starts no ranks."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def is_requeued() -> bool:
    """True in a job that SLURM started again by itself, in the same place and with the same command."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0") and not interactive_slurm()
