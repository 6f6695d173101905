"""Routed experts in the forms published checkpoints keep them in, and the values those forms stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP = 32
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # e2m1; the sign is the fourth bit

INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
                "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    # as Kimi-K2.5 lists what stays in bf16
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
MXFP4_CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def int4_experts(
    tensors: dict[str, Tensor], *, dequantised: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Routed experts as symmetric INT4 in groups of 32, packed by compressed-tensors; scales in bf16.

    Eight weights lie in an int32, the first in its lowest bits, as value + 8.
    """
    made: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if ".mlp.experts." not in name:
            made[name] = weight
            continue
        rows, columns = weight.shape
        groups = weight.view(rows, columns // GROUP, GROUP)
        scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp_min(1e-6).bfloat16().float()
        values = (groups / scale).round().clamp(-8, 7)
        if dequantised:
            made[name] = (
                (values * scale).view(rows, columns).bfloat16().float()
            )  # as both back ends unpack it
            continue
        nibbles = (values.view(rows, columns // 8, 8) + 8).to(torch.int64)
        words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
        stem = name.removesuffix("weight")
        made[f"{stem}weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
        made[f"{stem}weight_scale"] = scale[..., 0].bfloat16()
        made[f"{stem}weight_shape"] = torch.tensor([rows, columns])
    return made, {} if dequantised else {"quantization_config": INT4_CONFIG}


def mxfp4_experts(
    tensors: dict[str, Tensor], *, dequantised: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """gpt-oss's experts as MXFP4: blocks of 32 e2m1 values along the input, a power of two for each block.

    Published `[E, out, in / 32, 16]` bytes, the earlier value of each pair in the low half; transformers' own form
    is `[E, in, out]`.
    """
    made: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = weight.transpose(1, 2).reshape(experts, outputs, inputs // GROUP, GROUP)
        exponent = (blocks.abs().amax(-1, keepdim=True) / FP4[-1]).log2().ceil()
        scaled = blocks / exponent.exp2()
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
        if dequantised:
            values = (FP4[codes] * scaled.sign() * exponent.exp2()).reshape(experts, outputs, inputs)
            made[name] = values.transpose(1, 2)
            continue
        codes = codes + 8 * (scaled < 0)
        pairs = codes.view(experts, outputs, inputs // GROUP, GROUP // 2, 2)
        made[f"{name}_blocks"] = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
        made[f"{name}_scales"] = (exponent[..., 0] + 127).to(torch.uint8)
    return made, {} if dequantised else {"quantization_config": MXFP4_CONFIG}
