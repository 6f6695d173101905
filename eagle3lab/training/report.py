"""What a run says before its first update and after its last."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from eagle3lab.config.loss_text import describe_loss
from eagle3lab.config.noise import describe_noise
from eagle3lab.config.plan_training import TrainPlan
from eagle3lab.config.schema import HeadStart, ModelConfig, OptimConfig, OptimKind, TrainRoot, VerifierSource
from eagle3lab.data.domains import MAX_DOMAINS, Domains
from eagle3lab.engines.vllm_settings import architecture_overrides

from .console import domain_lines, share_text, short
from .datamodule import Eagle3DataModule
from .metrics import REAL, SIMULATED, domains_of
from .optim import warmup_updates
from .replicas import ranks_text
from .run_plan import RunPlan
from .selection import NAMES, describe_outcome
from .summary import TrainingSummary
from .weight_average import weights_label

_HEADS = {HeadStart.verifier: "the verifier's rows", HeadStart.random: "random weights"}


def start_lines(
    cfg: TrainRoot, plan: TrainPlan, updates: RunPlan, run_dir: Path, coverage: float, data: Eagle3DataModule
) -> str:
    """Derived numbers of the run, before step 1."""
    hardware, train = cfg.hardware, cfg.train
    warmup = (
        f"{cfg.optim.lr_warmup_tokens:,} tokens"
        if cfg.optim.lr_warmup_tokens
        else f"{warmup_updates(cfg.optim, updates)} updates"
    )
    lines = [
        f"run {cfg.run_name}",
        f"  directory          {run_dir}",
        f"  store              {cfg.store}: {updates.num_rows:,} training rows, {updates.rows_tokens:,} tokens"
        + (f" (train.data_share {train.data_share:g})" if train.data_share != 1 else ""),
        f"  validation         {_validation_text(data.domains)}; selects by {NAMES[train.select_by]}",
        f"  draft              {plan.size.trainable:,} trainable parameters, vocabulary {plan.size.vocab_size:,} "
        f"(covers {coverage:.2%} of the supervised tokens), K={cfg.draft.ttt_steps}, "
        f"head {'trained' if cfg.draft.train_head else 'frozen'} from {_HEADS[cfg.draft.head]}",
        f"  noise              {_noise_text(data)}",
        f"  loss               {describe_loss(cfg.loss)}",
        f"  devices            {updates.num_replicas} x {hardware.device_name or hardware.accelerator.value}, "
        f"{hardware.precision.value}, attention {hardware.attention.value}",
        f"  processes          {ranks_text(hardware)}",
        f"  updates            {updates.num_updates:,} of {train.seq_len * updates.num_replicas * updates.micro_batches:,} "
        f"token places each, {updates.num_tokens:,} tokens in all, {updates.num_epochs} epoch"
        f"{'s' if updates.num_epochs > 1 else ''}",
        f"  optimizer          {_optimizer_text(cfg.optim)}",
        f"  learning rate      {cfg.optim.lr:g} {cfg.optim.schedule.value}, warm-up {warmup}",
        f"  memory (estimate)  {plan.total_gib:.1f} GiB per device",
    ]
    if cfg.optim.lr_warmup_updates and cfg.optim.lr_warmup_updates >= updates.num_updates:
        lines.append(
            f"  note               the warm-up of {cfg.optim.lr_warmup_updates} updates is longer than the run: "
            "optim.lr is never reached (optim.lr_warmup_updates=0)"
        )
    return "\n".join(lines)


def _noise_text(data: Eagle3DataModule) -> str:
    rms = data.layer_rms
    if rms is None:
        return describe_noise(data.noise)
    shares = [f"{100 * ratio:.3g} % in layer {layer}" for layer, ratio in data.noise_ratios.items()]
    sizes = ", ".join(f"{size:.3g}" for size in rms.typical)
    return f"{describe_noise(data.noise)}: RMS {', '.join(shares)} of a typical token's state ({sizes})"


def _validation_text(domains: Domains) -> str:
    text = f"{len(domains.of_row):,} rows"
    if domains.told_apart:
        counts = zip(domains.names, domains.num_rows(), strict=True)
        return f"{text}: {', '.join(f'{name} {count:,}' for name, count in counts)}"
    if len(domains.names) > 1:
        return f"{text} of {len(domains.names)} files, too many to tell apart (at most {MAX_DOMAINS})"
    return text


def _optimizer_text(optim: OptimConfig) -> str:
    text = optim.kind.value
    if optim.kind is OptimKind.muon:
        text += f" for matrices (peak {optim.muon_lr or optim.lr:g}), adamw for norms"
    if optim.ema_decay is not None:
        text += f"; validates and exports averaged weights, ema_decay {optim.ema_decay:g}"
    return text


def closing_lines(
    cfg: TrainRoot,
    summary: TrainingSummary,
    run_dir: Path,
    exported_update: int,
    model_option: str,
    architecture: str,
) -> str:
    """What came out, and what to type next. `architecture`: the verifier's, as its config.json names it."""
    best = summary.best_validation or summary.last_validation
    model = f"model={model_option}"
    if cfg.model.source is VerifierSource.local:
        model += " " + shlex.join([f"model.name={cfg.model.name}", f"model.path={cfg.model.path}"])
    simulated, real = best.get(SIMULATED), best.get(REAL)
    first = summary.first_update_seconds
    first_text = f" (the first one {first:,.1f} s after the command)" if first else ""
    serve = json.dumps(
        {"method": "eagle3", "model": str(run_dir / "draft"), "num_speculative_tokens": cfg.draft.ttt_steps}
    )
    lines = [
        f"trained {summary.updates:,} updates, {summary.tokens:,} tokens in {summary.train_seconds:,.1f} s"
        + first_text,
        f"  speed    {summary.tokens_per_second:,.0f} tokens/s, "
        f"{summary.supervised_tokens_per_second:,.0f} supervised tokens/s, MFU {share_text(summary.mfu)}, "
        f"{summary.data_wait_share:.1%} waiting for data, {short(1e9 * summary.read_gb_per_second)}B/s read, "
        f"peak {summary.peak_memory_gib:.1f} GiB",
        f"  limited by {summary.limit}",
        f"exported {run_dir / 'draft'} ({weights_label(cfg.optim)} weights of update {exported_update:,}), "
        f"curves {run_dir / 'curves.png'}",
    ]
    if summary.last_validation or summary.best_validation:
        lines.append(describe_outcome(summary.selection))
    if simulated is not None:
        lines.append(
            f"simulated acceptance length {simulated:.3f} (teacher-forced, full vocabulary, with the bonus token)"
        )
    lines += [f"  {line}" for line in domain_lines(best, domains_of(best))]
    if real is not None:
        lines.append(f"real acceptance length {real:.3f} (by decoding the prompts of train.acceptance)")
    lines += [
        f"serve     vllm serve {shlex.quote(cfg.model.path or 'VERIFIER')} --speculative-config {shlex.quote(serve)}"
        + _engine_options(cfg.model, architecture),
        f"evaluate  python evaluate.py {shlex.quote(f'draft={run_dir}/draft')} {model}",
    ]
    return "\n".join(lines)


def _engine_options(model: ModelConfig, architecture: str) -> str:
    """What this verifier needs of vLLM beside the draft, to be served as it was trained for."""
    options = " --trust-remote-code" if model.trust_remote_code else ""
    if model.template_args:
        options += f" --default-chat-template-kwargs {shlex.quote(json.dumps(model.template_args))}"
    overrides = architecture_overrides(architecture)
    return options + (f" --hf-overrides '{json.dumps(overrides)}'" if overrides else "")
