"""Plans as the lines a person reads before spending GPU hours."""

from __future__ import annotations

from .plan_extraction import SCRATCH_SHARE, ExtractPlan
from .plan_training import TrainPlan
from .schema import ExtractorConfig, HardwareConfig, SamplingConfig

_NO_PEAK = "unknown (hardware.peak_tflops is not set)"


def _amount(value: float | None, pattern: str, unknown: str) -> str:
    return unknown if value is None else pattern.format(value)


def describe_training(
    plan: TrainPlan, hardware: HardwareConfig, choices: dict[str, str], run_name: str = ""
) -> str:
    """One line per need of a training run."""
    unsure = "" if plan.from_store or plan.num_updates is None else " at most, before the store exists"
    lines = [
        "plan of a training run (nothing was started)",
        f"  run name             {run_name}",
        "  choices              " + "  ".join(f"{k}={v}" for k, v in choices.items()),
        f"  draft                {plan.size.trainable:,} trainable parameters, {plan.size.frozen:,} frozen, "
        f"vocabulary {plan.size.vocab_size:,}",
        f"  devices              {plan.num_devices} x {hardware.device_name or hardware.accelerator.value} "
        f"({hardware.num_nodes} node{'s' if hardware.num_nodes > 1 else ''}), {hardware.precision.value}, "
        f"strategy {hardware.strategy.value}",
        f"  tokens per update    {plan.tokens_per_update:,} ({plan.accumulate} micro-batch"
        f"{'es' if plan.accumulate > 1 else ''} per device)",
        f"  updates              {_amount(plan.num_updates, '{:,}', 'unknown until the store exists')}{unsure}",
        f"  memory per device    {plan.total_gib:.1f} GiB of {_amount(plan.device_memory_gib, '{:.1f} GiB', 'unknown')}",
        *_parts(plan.memory_gib),
        f"  speed                {_speed(plan.tokens_per_second, hardware, plan.exchange_share)}",
        f"  read from the store  {plan.store_bytes_per_token:,} bytes per token, "
        f"{_amount(plan.disk_gb_per_second, '{:.2f} GB/s', _NO_PEAK)}",
        f"  time                 {_amount(plan.hours, '{:.2f} h', 'unknown')}",
    ]
    return "\n".join(lines)


def describe_extraction(
    plan: ExtractPlan,
    hardware: HardwareConfig,
    extract: ExtractorConfig,
    choices: dict[str, str],
    answers: SamplingConfig | None = None,
) -> str:
    """One line per need of an extraction; `answers`: how the verifier generates them first, if it does."""
    used = sum(plan.memory_gib.values())
    part = f"part {extract.part} of {extract.num_parts}, " if extract.num_parts > 1 else ""
    return "\n".join(
        [
            "plan of an extraction (nothing was started)",
            "  choices              " + "  ".join(f"{k}={v}" for k, v in choices.items()),
            f"  engine               {plan.data_parallel} of {plan.tensor_parallel} device"
            f"{'s' if plan.tensor_parallel > 1 else ''} each (tensor parallel {plan.tensor_parallel}, "
            f"data parallel {plan.data_parallel})",
            f"  memory per device    {used:.1f} GiB before the cache, usable "
            f"{_amount(plan.usable_gib, '{:.1f}', 'unknown')} of "
            f"{_amount(plan.device_memory_gib, '{:.1f} GiB', 'unknown')}",
            *_parts(plan.memory_gib),
            *_cache_lines(plan),
            f"  tokens               {part}{_amount(plan.num_tokens, 'at most {:,}', 'as many as the data hold')}",
            *([_describe_answers(answers)] if answers else []),
            f"  store                {_store_bytes(plan)}",
            f"  speed                {_speed(plan.tokens_per_second, hardware, plan.exchange_share)}",
            f"  write to the store   {_amount(plan.write_gb_per_second, '{:.2f} GB/s', _NO_PEAK)}",
            f"  time                 {_amount(plan.hours, '{:.2f} h', 'unknown')}"
            + (" for the states, after the answers" if answers else ""),
        ]
    )


def _parts(memory_gib: dict[str, float]) -> list[str]:
    return [f"      {gib:8.2f} GiB  {part}" for part, gib in memory_gib.items()]


def _speed(tokens_per_second: float | None, hardware: HardwareConfig, exchange_share: float) -> str:
    if tokens_per_second is None:
        return _NO_PEAK
    text = f"{tokens_per_second:,.0f} tokens/s at an assumed MFU of {hardware.assumed_mfu:.0%}"
    if exchange_share:
        text += f", {exchange_share:.0%} of the time for sums over devices at {hardware.link_gb_per_second:g} GB/s"
    return text


def _cache_lines(plan: ExtractPlan) -> list[str]:
    if not plan.cache_bytes_per_token:
        return []
    lines = []
    if plan.cache_gib is not None:
        lines = [
            f"      {max(0.0, plan.cache_gib):8.2f} GiB  left for the cache: {plan.cache_bytes_per_token:,} bytes per "
            f"token (keys, values and captured states), {plan.sequences_that_fit:,} rows of {plan.max_len:,} tokens"
        ]
    return [
        *lines,
        f"  states in flight     {plan.in_flight_gb:.1f} GB in /dev/shm or extract.scratch_dir, where "
        f"{plan.in_flight_gb / SCRATCH_SHARE:.1f} GB must be free, as much again in main memory",
    ]


def _store_bytes(plan: ExtractPlan) -> str:
    size = _amount(plan.disk_gb, "{:.2f} GB", "size unknown")
    if plan.min_bytes_per_token == plan.bytes_per_token:
        return f"{plan.bytes_per_token:,} bytes per token, {size}"
    return (
        f"{plan.min_bytes_per_token:,} to {plan.bytes_per_token:,} bytes per token, at most {size}: "
        "the last state only where supervised"
    )


def _describe_answers(sampling: SamplingConfig) -> str:
    return (
        f"  answers              generated by the verifier first, at most {sampling.max_new_tokens:,} tokens each: "
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, "
        f"top_k {sampling.top_k or 'off'}, seed {sampling.seed}"
    )
