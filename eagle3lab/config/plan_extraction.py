"""What an extraction would need, from shapes alone: engine memory, states in flight, disk, time. No torch, no device.

A forward pass of vLLM takes its work at `hardware.assumed_mfu` of the peak or the reading of all weights, whichever is
longer, and with tensor parallelism two sums over the devices in every layer, which it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan_sizes import GIB, all_reduce_seconds, stored_bytes_per_token
from .schema import (
    Accelerator,
    Backend,
    ExtractorConfig,
    HardwareConfig,
    LastState,
    Precision,
    Shapes,
)

# what a capture keeps under way; the figures of `extract.capture` and `engines.vllm_engine`
REQUEST_BYTES = 2**29
CALLS_PER_RUNNER = 6
SCRATCH_SHARE = 0.5  # of the free bytes of the scratch directory, `engines.vllm_files.FILL_SHARE`
MAX_SEQUENCES = 256  # of one forward pass
CONTEXT_GIB = 1.5  # assumed, not measured: CUDA context, NCCL's buffers, workspaces
HF_SHARE = 0.9  # of a device's memory, where no engine divides it


@dataclass(frozen=True)
class ExtractPlan:
    """Needs of an extraction, of this part of it where there are several; memory is of one device."""

    num_tokens: int | None
    disk_gb: float | None
    bytes_per_token: int
    min_bytes_per_token: int  # less where last states are kept only where supervised: if nothing is
    memory_gib: dict[str, float]  # without the cache
    usable_gib: float | None  # what the engine may take
    device_memory_gib: float | None
    cache_bytes_per_token: int  # on one device; 0: no engine with a cache
    max_len: int
    in_flight_gb: float  # states on their way through the scratch directory
    tensor_parallel: int
    data_parallel: int
    tokens_per_second: float | None  # of this machine
    exchange_share: float  # of the time, for the sums over the devices of an engine
    write_gb_per_second: float | None
    hours: float | None

    @property
    def cache_gib(self) -> float | None:
        """What is left for the cache, below 0 where nothing is."""
        return None if self.usable_gib is None else self.usable_gib - sum(self.memory_gib.values())

    @property
    def sequences_that_fit(self) -> int | None:
        """Rows of `max_len` tokens that one engine holds at a time; of an engine without a cache None."""
        if self.cache_gib is None or not self.cache_bytes_per_token:
            return None
        return max(0, int(self.cache_gib * GIB // (self.cache_bytes_per_token * self.max_len)))

    @property
    def fits(self) -> bool:
        if self.cache_gib is None:
            return True
        return self.cache_gib >= 0 and self.sequences_that_fit != 0


def plan_extraction(
    shapes: Shapes,
    hardware: HardwareConfig,
    extract: ExtractorConfig,
    *,
    num_layer_ids: int,
    num_tokens: int | None,
    max_len: int,
) -> ExtractPlan:
    """Plan an extraction; `num_tokens` where the data bound it (`data.max_tokens`), `max_len` of the longest row.

    How many tokens are supervised is not known before the data are read: bytes are those of all last states.
    """
    per_token = stored_bytes_per_token(shapes.hidden_size, num_layer_ids, extract.dtype)
    least = 0.0 if extract.last_state is LastState.supervised else 1.0
    by_engine = extract.backend is not Backend.hf and hardware.accelerator is not Accelerator.cpu
    parallel = hardware.engine.tensor_parallel if by_engine else 1
    replicas = hardware.engine.data_parallel if by_engine else 1
    width = 2 if hardware.precision is Precision.bf16 else 4
    captured = (num_layer_ids + 1) * shapes.hidden_size * width
    memory = _memory(shapes, hardware, extract.batch_tokens, parallel, width)
    usable = None
    if hardware.device_memory_gib is not None:
        usable = hardware.device_memory_gib * (hardware.engine.memory_share if by_engine else HF_SHARE)
        if by_engine and hardware.engine.cache_gib is not None:
            usable = min(usable, sum(memory.values()) + hardware.engine.cache_gib)
    speed, exchange_share = _speed(shapes, hardware, extract.batch_tokens, max_len, parallel)
    speed = speed * replicas if speed else None
    tokens = -(-num_tokens // extract.num_parts) if num_tokens else None
    request = max(extract.shard_tokens, REQUEST_BYTES // captured) * captured
    return ExtractPlan(
        num_tokens=tokens,
        disk_gb=tokens * per_token / 1e9 if tokens else None,
        bytes_per_token=per_token,
        min_bytes_per_token=stored_bytes_per_token(shapes.hidden_size, num_layer_ids, extract.dtype, least),
        memory_gib=memory,
        usable_gib=usable,
        device_memory_gib=hardware.device_memory_gib,
        cache_bytes_per_token=cache_bytes(shapes, parallel, width) + captured if by_engine else 0,
        max_len=max_len,
        in_flight_gb=request * CALLS_PER_RUNNER * replicas / 1e9 if by_engine else 0.0,
        tensor_parallel=parallel,
        data_parallel=replicas,
        tokens_per_second=speed,
        exchange_share=exchange_share,
        write_gb_per_second=speed * per_token / 1e9 if speed else None,
        hours=tokens / speed / 3600 if speed and tokens else None,
    )


def cache_bytes(shapes: Shapes, tensor_parallel: int, width: int) -> int:
    """Bytes of the keys and values of one token on one device, with full attention in every layer.

    Latent attention keeps one compressed vector for all heads, on every device; otherwise the key heads are divided
    over the devices, down to one each.
    """
    if shapes.kv_lora_rank is not None:
        return shapes.num_layers * (shapes.kv_lora_rank + (shapes.qk_rope_head_dim or 0)) * width
    return shapes.num_layers * 2 * max(1, shapes.num_kv_heads // tensor_parallel) * shapes.head_dim * width


def _memory(
    shapes: Shapes, hardware: HardwareConfig, batch_tokens: int, parallel: int, width: int
) -> dict[str, float]:
    """GiB of one device beside the cache. Of a prefill's token: the residual stream and its norm, the states before
    and after attention, its queries, keys and values, and two products of the MLP's width with their result.
    """
    h, head_dim = shapes.hidden_size, shapes.head_dim
    divided = (shapes.num_heads + 2 * shapes.num_kv_heads) * head_dim + 3 * shapes.intermediate_size
    chunk = batch_tokens * width * (4 * h + divided / parallel)
    logits = MAX_SEQUENCES * shapes.vocab_size * 4 * 2  # fp32, and what the sampler makes of them
    on_cuda = hardware.accelerator is not Accelerator.cpu
    parts = {
        "weights": shapes.num_parameters * shapes.bytes_per_parameter / parallel,
        f"activations of a prefill of {batch_tokens:,} tokens": chunk + logits,
        "CUDA context and buffers (assumed)": CONTEXT_GIB * GIB if on_cuda else 0,
    }
    return {part: num_bytes / GIB for part, num_bytes in parts.items() if num_bytes}


def forward_flops(shapes: Shapes, context: float) -> float:
    """Of a prefill, per token that sees `context` others on average: 2 per weight of a product, 4 q per pair.

    The embedding is looked up, and the head serves one position of a row: neither counts.
    """
    h, q = shapes.hidden_size, shapes.num_heads * shapes.head_dim
    layer = h * (q + 2 * shapes.num_kv_heads * shapes.head_dim) + q * h + 3 * h * shapes.intermediate_size
    weights = shapes.num_layers * layer
    if shapes.num_active_parameters is not None:
        weights = shapes.num_active_parameters - 2 * shapes.vocab_size * h
    return 2.0 * weights + 4.0 * q * context * shapes.num_layers


def _speed(
    shapes: Shapes, hardware: HardwareConfig, batch_tokens: int, max_len: int, parallel: int
) -> tuple[float | None, float]:
    """Tokens per second of one engine, and the share of the time that its devices exchange sums."""
    if not hardware.peak_tflops:
        return None, 0.0
    peak = parallel * hardware.peak_tflops * 1e12 * hardware.assumed_mfu
    computing = batch_tokens * forward_flops(shapes, max_len / 2) / peak
    if hardware.memory_gb_per_second:
        weights = shapes.num_parameters * shapes.bytes_per_parameter / parallel
        computing = max(computing, weights / (hardware.memory_gb_per_second * 1e9))
    sums = 2 * shapes.num_layers * batch_tokens * shapes.hidden_size * 2
    exchange = all_reduce_seconds(sums, parallel, hardware.link_gb_per_second)
    return batch_tokens / (computing + exchange), exchange / (computing + exchange)
