"""What an engine changes in the process it is started in, and how that is taken back."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def remember_process() -> Callable[[], None]:
    """What undoes that an engine sets variables (its ranks, for one: torchrun's own), and that one for the CPU in
    this process binds its threads and disables torch's switch."""
    variables = dict(os.environ)
    cpus, num_threads, switch = os.sched_getaffinity(0), torch.get_num_threads(), torch.set_num_threads

    def put_back() -> None:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads = switch
        torch.set_num_threads(num_threads)

    return put_back
