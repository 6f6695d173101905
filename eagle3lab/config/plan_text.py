"""Plans as the lines a person reads before spending GPU hours."""

from __future__ import annotations

from .errors import Problem, UserError
from .plan import ExtractPlan, TrainPlan
from .schema import HardwareConfig


def _amount(value: float | None, pattern: str, unknown: str) -> str:
    return unknown if value is None else pattern.format(value)


def describe_training(
    plan: TrainPlan, hardware: HardwareConfig, choices: dict[str, str], run_name: str = ""
) -> str:
    """One line per need of a training run."""
    no_peak = "unknown (hardware.peak_tflops is not set)"
    lines = [
        "plan of a training run (nothing was started)",
        f"  run name             {run_name}",
        "  choices              " + "  ".join(f"{k}={v}" for k, v in choices.items()),
        f"  draft                {plan.size.trainable:,} trainable parameters, {plan.size.frozen:,} frozen, "
        f"vocabulary {plan.size.vocab_size:,}",
        f"  devices              {plan.num_devices} x {hardware.device_name or hardware.accelerator.value} "
        f"({hardware.num_nodes} node{'s' if hardware.num_nodes > 1 else ''}), {hardware.precision.value}",
        f"  tokens per update    {plan.tokens_per_update:,} ({plan.accumulate} micro-batch"
        f"{'es' if plan.accumulate > 1 else ''} per device)",
        f"  updates              {_amount(plan.num_updates, '{:,}', 'unknown until the store exists')}",
        f"  memory per device    {plan.total_gib:.1f} GiB of {_amount(plan.device_memory_gib, '{:.1f} GiB', 'unknown')}",
    ]
    lines += [f"      {gib:8.2f} GiB  {part}" for part, gib in plan.memory_gib.items()]
    lines += [
        f"  speed                {_amount(plan.tokens_per_second, '{:,.0f} tokens/s', no_peak)}"
        + (f" at an assumed MFU of {hardware.assumed_mfu:.0%}" if plan.tokens_per_second else ""),
        f"  read from the store  {plan.store_bytes_per_token:,} bytes per token, "
        f"{_amount(plan.disk_gb_per_second, '{:.2f} GB/s', no_peak)}",
        f"  time                 {_amount(plan.hours, '{:.2f} h', 'unknown')}",
    ]
    return "\n".join(lines)


def describe_extraction(plan: ExtractPlan, hardware: HardwareConfig, choices: dict[str, str]) -> str:
    """One line per need of an extraction."""
    no_peak = "unknown (hardware.peak_tflops is not set)"
    return "\n".join(
        [
            "plan of an extraction (nothing was started)",
            "  choices              " + "  ".join(f"{k}={v}" for k, v in choices.items()),
            f"  verifier weights     {plan.weights_gib_per_device:.1f} GiB per device of "
            f"{_amount(plan.device_memory_gib, '{:.1f} GiB', 'unknown')} "
            f"(tensor parallel {hardware.engine.tensor_parallel})",
            f"  tokens               {_amount(plan.num_tokens, 'at most {:,}', 'as many as the data hold')}",
            f"  store                {plan.bytes_per_token:,} bytes per token, {_amount(plan.disk_gb, '{:.2f} GB', 'size unknown')}",
            f"  speed                {_amount(plan.tokens_per_second, '{:,.0f} tokens/s', no_peak)}",
            f"  write to the store   {_amount(plan.write_gb_per_second, '{:.2f} GB/s', no_peak)}",
            f"  time                 {_amount(plan.hours, '{:.2f} h', 'unknown')}",
        ]
    )


def require_fit(plan: TrainPlan | ExtractPlan, hardware: HardwareConfig) -> None:
    """Refuse a plan that the device memory cannot hold, with what would fit."""
    if plan.fits:
        return
    if isinstance(plan, TrainPlan):
        activations = plan.memory_gib["activations"] + plan.memory_gib["batches in flight"]
        room = 0.95 * (plan.device_memory_gib or 0) - (plan.total_gib - activations)
        share = room / activations if activations else 0.0
        fix = (
            f"train.seq_len at {share:.0%} of its value"
            if share > 0.05
            else "a narrower draft or a larger device"
        )
        raise UserError(
            Problem(
                f"the plan does not fit {hardware.name}",
                f"{plan.total_gib:.1f} GiB per device",
                f"at most 95 % of {plan.device_memory_gib:.1f} GiB",
                fix,
            )
        )
    raise UserError(
        Problem(
            f"the verifier does not fit {hardware.name}",
            f"{plan.weights_gib_per_device:.1f} GiB of weights per device",
            f"at most 90 % of {plan.device_memory_gib:.1f} GiB",
            "hardware.engine.tensor_parallel=8 on a larger node, or a smaller model",
        )
    )
