"""One trial as a command of its own, where a trial is several processes that nobody else starts.

Lightning starts the other ranks of a run by repeating the command. In a sweep that would be the whole sweep again,
and in a worker of a launcher it is the launcher's command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from eagle3lab.config.errors import EXIT_STOPPED, Problem, StoppedBySignal, UserError
from eagle3lab.config.invocation import Invocation
from eagle3lab.config.schema import Accelerator, HardwareConfig
from eagle3lab.config.stamp import interactive_slurm

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def num_unstarted(hardware: HardwareConfig, visible_gpus: Callable[[], int]) -> int | None:
    """Devices of a trial that is several processes which torchrun or SLURM did not start; None for others."""
    devices = hardware.num_devices or (1 if hardware.accelerator is Accelerator.cpu else visible_gpus() or 1)
    started = "LOCAL_RANK" in os.environ or ("SLURM_NTASKS" in os.environ and not interactive_slurm())
    return devices if devices * hardware.num_nodes > 1 and not started else None


def run_as_command(script: str, invocation: Invocation, overrides: Mapping[str, str]) -> None:
    """Run the trial and wait; SIGTERM and SIGUSR1 are passed on to it.

    `overrides` replace those of the sweep. Raises UserError when the command fails, StoppedBySignal when it
    was stopped; it has said why itself.
    """
    kept = [word for word in invocation.overrides if word.lstrip("+").partition("=")[0] not in overrides]
    flags = invocation.single_run_flags()
    words = [sys.executable, script, *flags, *kept, *(f"{key}={value}" for key, value in overrides.items())]
    process = subprocess.Popen(words, cwd=invocation.cwd)
    code = _wait(process)
    if code == 0:
        return
    problem = Problem(f"the trial's command ended with {code}", " ".join(words[1:]))
    raise (StoppedBySignal if code in (EXIT_STOPPED, -signal.SIGTERM) else UserError)(problem)


def _wait(process: subprocess.Popen[bytes]) -> int:
    if threading.current_thread() is not threading.main_thread():
        return process.wait()

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it has."""
    text = str(path).replace("'", "\\'")
    return f"'{text}'"
