"""Whether the installed vllm has what capture is built on: by its parts and never by its version."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import typing
from typing import Any

from eagle3lab.config.errors import Problem, UserError

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}  # read when vllm and tqdm are imported
CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
SPECULATIVE_MODULE = "vllm.config.speculative"
METHOD = "extract_hidden_states"
EAGLE3 = "eagle3"
DRAFT_SAMPLING = "draft_sample_method"
ENGINE_METHODS = ("enqueue", "collective_rpc")
# what the connector has since it was rewritten in 0.24: saves after the whole prompt, by one rank, under a lock
CONNECTOR_PARTS = ("ExampleHiddenStatesConnector", "PendingSave", "load_hidden_states")
# and what our own subclass for the CPU stands on
CPU_CONNECTOR_PARTS = ("extract_from_kv_cache",)
CPU_CONNECTOR_METHODS = ("_submit_async_write", "_write_tensors", "_on_write_done")


def installed_version() -> str | None:
    """The version of vllm, under whatever name it was installed; None without it."""
    for name in importlib.metadata.packages_distributions().get("vllm", ()):
        return importlib.metadata.version(name)
    return None


def require_vllm(device: str, *, decodes: bool = False) -> None:
    """Raise `UserError` unless the installed vllm has everything that capture on `device` is built on.

    `decodes`: or that decoding with a draft is built on.
    """
    missing = missing_capabilities(device, decodes=decodes)
    if missing:
        version = installed_version()
        work = "decode with a draft" if decodes else "capture hidden states"
        raise UserError(
            Problem(
                f"vllm cannot {work} here: "
                + (
                    "it is not installed"
                    if version is None
                    else f"version {version} lacks {', '.join(missing)}"
                ),
                expected=f"vllm 0.25 or later with {EAGLE3 if decodes else METHOD}",
                fix=f"pip install 'vllm>=0.25', or {'decode' if decodes else 'extract'}.backend=hf",
            )
        )


def missing_capabilities(device: str, *, decodes: bool = False) -> list[str]:
    """What the code below uses and the installed vllm does not have, by name."""
    for name, value in QUIET.items():  # this may be the first import of vllm
        os.environ.setdefault(name, value)
    missing = []
    wanted: dict[str, tuple[str, ...]] = {
        "vllm": ("LLM", "SamplingParams"),
        SPECULATIVE_MODULE: ("SpeculativeConfig",),
    }
    if decodes:
        wanted["vllm.sampling_params"] = ("RequestOutputKind",)
    else:
        wanted[CONNECTOR_MODULE] = CONNECTOR_PARTS + (CPU_CONNECTOR_PARTS if device == "cpu" else ())
    for module_name, names in wanted.items():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a broken installation raises anything
            missing.append(f"{module_name} ({type(error).__name__}: {error})")
            continue
        missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    if missing:
        return missing
    llm = importlib.import_module("vllm").LLM
    missing += [f"vllm.LLM.{method}" for method in ENGINE_METHODS if not hasattr(llm, method)]
    config = importlib.import_module(SPECULATIVE_MODULE).SpeculativeConfig
    hints = typing.get_type_hints(config)
    method = EAGLE3 if decodes else METHOD
    if method not in _literals(hints.get("method")):
        missing.append(f"the speculative method {method}")
    if decodes:
        missing += [] if DRAFT_SAMPLING in hints else [f"SpeculativeConfig.{DRAFT_SAMPLING}"]
    elif device == "cpu":
        connector = importlib.import_module(CONNECTOR_MODULE).ExampleHiddenStatesConnector
        missing += [f"{connector.__name__}.{m}" for m in CPU_CONNECTOR_METHODS if not hasattr(connector, m)]
    return missing


def _literals(annotation: Any) -> set[Any]:
    """Every value named by a (nested) Literal or Union."""
    found: set[Any] = set()
    for argument in typing.get_args(annotation):
        found |= _literals(argument) if typing.get_args(argument) else {argument}
    return found
