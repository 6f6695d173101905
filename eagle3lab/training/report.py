"""What a run says before its first update and after its last."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3lab.config.plan import TrainPlan
from eagle3lab.config.schema import NoiseKind, TrainRoot, VerifierSource

from .run_plan import RunPlan
from .summary import TrainingSummary


def start_lines(cfg: TrainRoot, plan: TrainPlan, updates: RunPlan, run_dir: Path, coverage: float) -> str:
    """Derived numbers of the run, before step 1."""
    hardware, train = cfg.hardware, cfg.train
    noise = "none" if cfg.noise.kind is NoiseKind.none else f"{cfg.noise.kind.value} {cfg.noise.scale:g}"
    warmup = (
        f"{cfg.optim.lr_warmup_tokens:,} tokens"
        if cfg.optim.lr_warmup_tokens
        else f"{cfg.optim.lr_warmup_updates or 0} updates"
    )
    lines = [
        f"run {cfg.run_name}",
        f"  directory          {run_dir}",
        f"  store              {cfg.store}: {updates.num_rows:,} training rows, {updates.rows_tokens:,} tokens",
        f"  draft              {plan.size.trainable:,} trainable parameters, vocabulary {plan.size.vocab_size:,} "
        f"(covers {coverage:.2%} of the supervised tokens), K={cfg.draft.ttt_steps}, noise {noise}",
        f"  devices            {updates.num_replicas} x {hardware.device_name or hardware.accelerator.value}, "
        f"{hardware.precision.value}, attention {hardware.attention.value}",
        f"  updates            {updates.num_updates:,} of {train.seq_len * updates.num_replicas * updates.micro_batches:,} "
        f"token places each, {updates.num_tokens:,} tokens in all, {updates.num_epochs} epoch"
        f"{'s' if updates.num_epochs > 1 else ''}",
        f"  learning rate      {cfg.optim.lr:g} {cfg.optim.schedule.value}, warm-up {warmup}",
        f"  memory (estimate)  {plan.total_gib:.1f} GiB per device",
    ]
    if cfg.optim.lr_warmup_updates and cfg.optim.lr_warmup_updates >= updates.num_updates:
        lines.append(
            f"  note               the warm-up of {cfg.optim.lr_warmup_updates} updates is longer than the run: "
            "optim.lr is never reached (optim.lr_warmup_updates=0)"
        )
    return "\n".join(lines)


def closing_lines(
    cfg: TrainRoot, summary: TrainingSummary, run_dir: Path, exported_update: int, model_option: str
) -> str:
    """What came out, and what to type next."""
    best = summary.best_validation or summary.last_validation
    model = f"model={model_option}"
    if cfg.model.source is VerifierSource.local:
        model += f" model.name={cfg.model.name} model.path={cfg.model.path}"
    simulated = best.get("val/simulated_acceptance_length")
    serve = json.dumps(
        {"method": "eagle3", "model": str(run_dir / "draft"), "num_speculative_tokens": cfg.draft.ttt_steps}
    )
    lines = [
        f"trained {summary.updates:,} updates, {summary.tokens:,} tokens in {summary.train_seconds:,.1f} s "
        f"({summary.tokens_per_second:,.0f} tokens/s, {summary.data_wait_share:.1%} waiting for data, "
        f"peak {summary.peak_memory_gib:.1f} GiB)",
        f"exported {run_dir / 'draft'} (weights of update {exported_update:,}), curves {run_dir / 'curves.png'}",
    ]
    if simulated is not None:
        lines.append(
            f"simulated acceptance length {simulated:.3f} (teacher-forced, full vocabulary, with the bonus token)"
        )
    lines += [
        f"serve     vllm serve {cfg.model.path or 'VERIFIER'} --speculative-config '{serve}'",
        f"evaluate  python evaluate.py draft={run_dir / 'draft'} {model}",
    ]
    return "\n".join(lines)
