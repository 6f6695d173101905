"""What a vLLM engine is started with. Imports no vllm and no torch device: it travels to child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER_EXTENSION = "eagle3lab.engines.vllm_worker.CaptureExtension"
CPU_CONNECTOR_MODULE = "eagle3lab.engines.vllm_cpu_connector"
DECODE_SEQUENCES = 512  # the most that CUDA graphs are captured for by default
DECODE_BATCH_TOKENS = 8192
START_SECONDS = 1800.0  # large checkpoints from slow disks
MLA_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
# Whose layers vLLM's own implementation gives no states of (0.26 to 0.32): it runs those of transformers instead.
BY_TRANSFORMERS = {
    "Gemma3ForCausalLM": "TransformersForCausalLM",
    "Glm4MoeForCausalLM": "TransformersMoEForCausalLM",
}


@dataclass(frozen=True)
class Decoding:
    """How an engine decodes whose acceptance and speed are measured."""

    num_sequences: int  # most that are decoded together
    draft: Path | None = None  # an exported draft, served as it is; None: the verifier alone
    k: int = 0  # drafted tokens per verification step
    proposal: str = "greedy"  # or "probabilistic": how tokens are drafted where they are sampled


@dataclass(frozen=True)
class VllmSettings:
    """One engine: a verifier on `tensor_parallel` devices."""

    path: Path
    model_type: str
    layer_ids: tuple[int, ...]  # captured, ascending, the last is num_layers; empty: it answers prompts
    dtype: str  # "float32", "bfloat16"
    device: str  # "cuda", "cpu"
    max_len: int  # tokens of the longest sequence
    batch_tokens: int  # tokens of one forward pass; longer prompts are prefilled in chunks
    scratch: Path | None  # where states are handed over; None: none are
    eos_token_ids: tuple[int, ...]
    max_positions: int
    decoding: Decoding | None = None  # what it decodes with; None: it captures or answers
    tensor_parallel: int = 1
    memory_share: float = 0.9
    eager: bool = False  # no compilation, no CUDA graphs
    cache_gib: float | None = (
        None  # None: vLLM measures what is left, which engines that start beside it disturb
    )
    trust_remote_code: bool = False
    architecture: str = ""  # as config.json names it
    start_seconds: float = START_SECONDS
    least_tokens_per_second: float = 20.0  # slower than this is a hang
    least_seconds: float = 300.0

    def answer_seconds(self, num_tokens: int) -> float:
        """How long a request over `num_tokens` may take."""
        return self.least_seconds + num_tokens / self.least_tokens_per_second

    @property
    def on_cpu_with_latent_attention(self) -> bool:
        """Where the CPU build needs care."""
        return self.device == "cpu" and self.model_type in MLA_MODEL_TYPES

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward; whole prompts where the prefill is not chunked (latent attention on CPU)."""
        least = self.max_len + 1 if self.on_cpu_with_latent_attention else 32
        return max(self.batch_tokens, least)

    @property
    def instead(self) -> str:
        """The override that takes another engine."""
        return "extract.backend=hf" if self.decoding is None else "decode.backend=hf"

    @property
    def captures(self) -> bool:
        """Whether it hands over hidden states; else it answers prompts."""
        return bool(self.layer_ids)

    @property
    def model_len(self) -> int:
        """Longest sequence for vLLM: a request for states ends with one token more."""
        return self.max_len + self.captures

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self.path),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # no sampling defaults of the checkpoint: every request states its own
            "dtype": self.dtype,
            "seed": 0,
            "trust_remote_code": self.trust_remote_code,
            "tensor_parallel_size": self.tensor_parallel,
            "gpu_memory_utilization": self.memory_share,
            "max_model_len": self.model_len,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "language_model_only": True,  # rows are text: no vision tower is loaded
        }
        if self.cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(self.cache_gib * 2**30)
        if overrides := architecture_overrides(self.architecture):
            arguments["hf_overrides"] = overrides
        if self.decoding is not None:
            arguments |= self._for_decoding(self.decoding)
        else:
            arguments |= self._for_states() if self.captures else self._for_answers()
        if self.on_cpu_with_latent_attention:
            # the fused rotary kernel of the CPU build is wrong for MLA with default RoPE
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        return arguments

    def _for_answers(self) -> dict[str, Any]:
        """Decoding: many sequences at once, CUDA graphs, and prefixes of earlier turns computed once."""
        on_cpu = self.device == "cpu"
        batch_tokens = self.forward_tokens if on_cpu else max(self.forward_tokens, DECODE_BATCH_TOKENS)
        return {
            "max_num_batched_tokens": batch_tokens,
            "max_num_seqs": min(batch_tokens, 64 if on_cpu else DECODE_SEQUENCES),
            "enforce_eager": on_cpu or self.eager,
            "enable_prefix_caching": True,
        }

    def _for_decoding(self, decoding: Decoding) -> dict[str, Any]:
        """Nothing but the draft may differ between two engines that are compared, nor between two passes of one."""
        on_cpu = self.device == "cpu"
        least = max(
            self.forward_tokens, decoding.num_sequences * (decoding.k + 1)
        )  # no step drafts fewer than k
        arguments: dict[str, Any] = {
            "max_num_batched_tokens": least if on_cpu else max(least, DECODE_BATCH_TOKENS),
            "max_num_seqs": decoding.num_sequences,
            "enforce_eager": on_cpu or self.eager,
            "enable_prefix_caching": False,  # a second pass over the same prompts would be given their prefill
            "disable_log_stats": False,  # the engine's own counts, to hold ours against
            "logprobs_mode": "raw_logits",
        }
        if decoding.draft is not None:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": str(decoding.draft),
                "num_speculative_tokens": decoding.k,
                "draft_sample_method": decoding.proposal,
            }
        return arguments

    def _for_states(self) -> dict[str, Any]:
        """Capture: eager, uncached, with vLLM's own extraction and our hooks."""
        connector = "CPUHiddenStatesConnector" if self.device == "cpu" else "ExampleHiddenStatesConnector"
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(self.scratch),
                "num_writer_threads": 8,
            },
        }
        if self.device == "cpu":
            transfer["kv_connector_module_path"] = CPU_CONNECTOR_MODULE
        return {
            "max_num_batched_tokens": self.forward_tokens,
            "max_num_seqs": max(1, min(256, self.batch_tokens // 4)),
            "enforce_eager": True,  # the hooks of the second opinion need it; a prefill gains nothing from graphs
            "enable_prefix_caching": False,  # cached tokens have no states
            "worker_extension_cls": WORKER_EXTENSION,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layer_ids)}
                },
            },
            "kv_transfer_config": transfer,
        }

    def prepare_environment(self) -> None:
        """Variables that vLLM reads; what the user has set wins."""
        for name, value in self.environment().items():
            os.environ.setdefault(name, value)

    def environment(self) -> Mapping[str, str]:
        """Offline, new processes by spawn; on the CPU in this process and with little cache."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # CUDA is initialised here already
        }
        if self.model_len > self.max_positions:
            variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the one token more is never fed to the model
        if self.device == "cpu":
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
            if self.on_cpu_with_latent_attention and self.decoding is not None:
                # no block size of the cache suits the kernel for it and that for a draft's attention: the verifier's
                # is computed in full, without a draft too, so that the two engines that are compared are alike
                variables["VLLM_MLA_DISABLE"] = "1"
            if self.tensor_parallel == 1:
                variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            else:
                cpus = sorted(os.sched_getaffinity(0))
                share = max(1, len(cpus) // self.tensor_parallel)
                groups = [cpus[i * share : (i + 1) * share] for i in range(self.tensor_parallel)]
                variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, g)) for g in groups)
        return variables


def architecture_overrides(architecture: str) -> dict[str, list[str]]:
    """What vLLM must be told of config.json to give this verifier's states; not `model_impl`, the draft's too."""
    return {"architectures": [BY_TRANSFORMERS[architecture]]} if architecture in BY_TRANSFORMERS else {}
