"""Loading a Hugging Face causal language model from a local directory, with nothing left at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.utils import logging as transformers_logging

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.engines.base import first_line
from eagle3lab.verifier.facts import read_json

# Published with code of their own, written for transformers 4, and with the architecture of DeepSeek-V3, which
# transformers has: that is taken, and their code is left alone even where it is trusted for the tokenizer.
_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2")
_AROUND_DEEPSEEK_V3 = {"kimi_k25": "language_model"}  # model type -> where its text part's weights are

# what transformers makes of a config.json with values that it does not know, or of another kind
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


def load_causal_lm(
    path: Path, *, num_layers: int, dtype: torch.dtype, device: str, trust_remote_code: bool = False
) -> Any:
    """The model in `path`, in evaluation mode, without gradients, on `device`.

    Raises:
        UserError: the directory cannot be loaded, or the device has no room for it.
        IntegrityError: weights are damaged, missing or of another shape (transformers would draw them at random).
    """
    with _quiet_transformers():
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **(_as_deepseek_v3(path) or {"trust_remote_code": trust_remote_code}),
                **_without_kernels(path, device),
            )
        except ImportError as error:  # of a quantised form, for one
            raise UserError(
                Problem(
                    f"transformers needs a package for this verifier ({first_line(error)})",
                    str(path),
                    fix="install it, or another back end: extract.backend=vllm",
                )
            ) from error
        except SafetensorError as error:
            raise IntegrityError(Problem(f"{path} holds a damaged safetensors file", str(error))) from error
        except _UNLOADABLE as error:
            is_of_a_value = isinstance(error, StrictDataclassError)  # it names the value on its second line
            reason = " ".join(str(error).split()) if is_of_a_value else first_line(error)
            raise UserError(
                Problem(
                    f"the verifier could not be loaded by transformers ({reason})",
                    str(path),
                    "a directory with config.json and *.safetensors of a causal language model",
                    "model.path=DIRECTORY (model.trust_remote_code=true where the model brings its own code)",
                )
            ) from error
    wrong = sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})
    if wrong:
        raise IntegrityError(
            Problem(
                f"the verifier's checkpoint lacks {len(wrong)} weights or has them in another shape",
                wrong[:3],
                "every weight of the architecture in config.json",
                "model.path=DIRECTORY of a complete checkpoint",
            )
        )
    find_layers(model, num_layers)
    if dtype is torch.float32:  # what was unpacked from a quantised form is bf16, whatever was asked for
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    return model.to(device).eval().requires_grad_(False)


def _as_deepseek_v3(path: Path) -> dict[str, Any] | None:
    """How to load the text model of a checkpoint that holds a DeepSeek-V3; None for any other."""
    written = read_json(path, "config.json")
    kind = written.get("model_type")
    how: dict[str, Any] = {"trust_remote_code": False}
    if kind in _AROUND_DEEPSEEK_V3:
        # the vision tower is not read: a verifier's rows are text
        how["key_mapping"] = {rf"^{_AROUND_DEEPSEEK_V3[kind]}\.": ""}
        written = written.get("text_config", {})
    if written.get("model_type") not in _DEEPSEEK_V3:
        return None
    values = {k: v for k, v in written.items() if k not in ("model_type", "auto_map", "architectures")}
    config = AutoConfig.for_model("deepseek_v3", **values)
    config.model_type = "deepseek_v3"  # vLLM, once it read a Kimi-K2 in this process, has renamed the class's
    return {**how, "config": config}


def _without_kernels(path: Path, device: str) -> dict[str, Any]:
    """MXFP4 experts (gpt-oss) are unpacked on the CPU: their kernels are for GPUs. The values are the same."""
    quantised = read_json(path, "config.json").get("quantization_config") or {}
    if device != "cpu" or quantised.get("quant_method") != "mxfp4":
        return {}
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def find_layers(model: Any, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The inner model without its head, and its decoder layers.

    Wrappers (vision-language models, nested `language_model`) are walked until a module is found that
    holds `layers` of the length that config.json states.
    """
    candidates = [model.get_decoder(), *model.modules()]
    for module in candidates:
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and hasattr(module, "norm"):
            return module, layers
    raise UserError(
        Problem(
            f"no list of {num_layers} decoder layers with a final norm in {type(model).__name__}",
            None,
            "an architecture with `layers` and `norm`, as Llama, Qwen, Mistral, DeepSeek and gpt-oss have",
            "another verifier",
        )
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bar and the notes that from_pretrained writes into a log."""
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()
