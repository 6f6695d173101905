"""Which tiny checkpoint stands for which option of conf/model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stand:
    """`kind` has the published layout. `served`: the same values in a layout that vLLM runs on a CPU."""

    kind: str
    twin: str | None = None
    why_twin: str = ""

    @property
    def served(self) -> str:
        return self.twin or self.kind


_MXFP4 = "vLLM runs MXFP4 experts in bf16 alone and has no kernel for them on this CPU"
_INT4 = "vLLM has no kernel for INT4 experts on this CPU"

# smollm2_135m and tiny are real models, and local is any
STANDS: dict[str, Stand] = {
    "llama31_8b": Stand("llama"),
    "llama33_70b": Stand("llama"),
    "qwen3_4b": Stand("qwen3_tied"),
    "qwen3_8b": Stand("qwen3"),
    "qwen3_14b": Stand("qwen3"),
    "qwen3_32b": Stand("qwen3"),
    "qwen3_30b_a3b": Stand("qwen3_moe"),
    "qwen3_235b": Stand("qwen3_moe"),
    "gpt_oss_20b": Stand("gpt_oss_mxfp4", "gpt_oss", _MXFP4),
    "gpt_oss_120b": Stand("gpt_oss_mxfp4", "gpt_oss", _MXFP4),
    "deepseek_v3": Stand("deepseek_v3"),
    "kimi_k2": Stand("kimi_k2"),
    "kimi_k25_int4": Stand("kimi_k25_int4", "kimi_k25", _INT4),
    "gemma3_1b": Stand("gemma3"),
    "glm45_air": Stand("glm4_moe"),
}
