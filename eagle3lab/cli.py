"""The three commands: `run_extract`, `run_train`, `run_evaluate`. What Hydra does around them: `under_hydra`."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import raise_all
from eagle3lab.config.flops import flops_counter
from eagle3lab.config.invocation import Invocation, absolute_data, absolute_model, default_store, named
from eagle3lab.config.names import honest_choices
from eagle3lab.config.plan_extraction import plan_extraction
from eagle3lab.config.plan_fit import require_extraction_fit, require_training_fit
from eagle3lab.config.plan_sizes import StoreCounts
from eagle3lab.config.plan_text import describe_extraction, describe_training
from eagle3lab.config.plan_training import TrainPlan, plan_training
from eagle3lab.config.schema import EvaluateRoot, ExtractRoot, Shapes, TrainRoot
from eagle3lab.config.stamp import is_rank_zero
from eagle3lab.experiments.stages import stage_seconds
from eagle3lab.under_hydra import run_command

if TYPE_CHECKING:
    from eagle3lab.draft.speculators_model import Eagle3DraftModel
    from eagle3lab.evaluate.meter import DraftMeter
    from eagle3lab.store.reader import StoreReader
    from eagle3lab.training.summary import TrainingSummary
    from eagle3lab.verifier.facts import VerifierFacts


def main(entry: str) -> None:
    """Run `train`, `extract` or `evaluate` with the command line, under Hydra."""
    runs: dict[str, Callable[[Any, Invocation], float | None]] = {
        "train": run_train,
        "extract": run_extract,
        "evaluate": run_evaluate,
    }
    run_command(entry, runs[entry])


def run_extract(cfg: ExtractRoot, invocation: Invocation) -> None:
    """Conversations -> rows -> hidden states -> a finished, checked store."""
    from eagle3lab.engines.devices import apply_environment, resolve_hardware
    from eagle3lab.verifier.shapes import layer_ids_of, shapes_of

    hardware = resolve_hardware(cfg.hardware, require=not cfg.plan)
    model, data = absolute_model(cfg.model, invocation), absolute_data(cfg.data, invocation)
    store = invocation.path(cfg.store) if cfg.store else default_store(model, data, invocation)
    shapes = shapes_of(model)
    layer_ids = layer_ids_of(cfg.extract.layer_ids, "extract.layer_ids", cfg.model, shapes.num_layers)
    plan_for = partial(
        plan_extraction,
        shapes,
        num_layer_ids=len(layer_ids),
        num_tokens=cfg.data.max_tokens,
        max_len=cfg.data.max_len,
    )
    plan = plan_for(hardware, cfg.extract)
    if cfg.plan:
        answers = cfg.data.sampling if cfg.data.regenerate else None
        print(describe_extraction(plan, hardware, cfg.extract, invocation.groups(), answers))
    num_devices = hardware.num_devices or 1
    require_extraction_fit(plan, hardware, cfg.extract, shapes, plan_for, num_devices=num_devices)
    if cfg.plan:
        return
    apply_environment(hardware)
    from eagle3lab.doctor.preflight import before_extraction

    print(before_extraction(cfg.extract, hardware, store))
    from eagle3lab.experiments.extraction_run import track_extraction
    from eagle3lab.extract.pipeline import extract_store

    report = extract_store(model=model, data=data, extract=cfg.extract, hardware=hardware, store=store)
    print(report.describe())
    track_extraction(cfg, invocation, store, report.to_json())


def run_train(cfg: TrainRoot, invocation: Invocation) -> float | None:
    """A store -> a trained draft, its curves and its export; returns the simulated acceptance length."""
    cfg = named(cfg, invocation)
    from eagle3lab.engines.devices import apply_environment, resolve_hardware
    from eagle3lab.verifier.shapes import draft_layer_ids, shapes_of

    cfg.hardware = hardware = resolve_hardware(cfg.hardware, require=not cfg.plan)
    raise_all(CHECKS["train"](cfg))  # once more: the devices and the attention are known now
    shapes = shapes_of(cfg.model)
    aux_layer_ids = draft_layer_ids(cfg.draft, cfg.model, shapes)
    plan_for = partial(
        plan_training,
        shapes,
        num_aux=len(aux_layer_ids),
        num_devices_per_node=hardware.num_devices or 1,
        store=StoreCounts.read(Path(str(cfg.store))),
        optim=cfg.optim,
        most_tokens=cfg.data.max_tokens,
    )
    plan = plan_for(cfg.draft, hardware, cfg.train)
    if cfg.plan:
        chosen = honest_choices(invocation.groups(), invocation.overrides, cfg)
        print(describe_training(plan, hardware, chosen, str(cfg.run_name)))
    require_training_fit(plan, cfg.draft, hardware, cfg.train, shapes, plan_for, longest_row=cfg.data.max_len)
    if cfg.plan:
        return None
    apply_environment(hardware)
    atexit.register(gc.freeze)  # else the collector's last walk over all that is imported takes a second
    if is_rank_zero():
        from eagle3lab.doctor.preflight import before_training

        print(before_training(hardware, Path(str(cfg.run_dir))))
    return _train(cfg, invocation, shapes, aux_layer_ids, plan)


def _train(
    cfg: TrainRoot, invocation: Invocation, shapes: Shapes, aux_layer_ids: tuple[int, ...], plan: TrainPlan
) -> float | None:
    """The planned run. What only it needs is imported here: a plan and a refusal do not wait for it."""
    from eagle3lab.draft.speculators_model import build_draft
    from eagle3lab.draft.vocabulary import DraftVocabulary
    from eagle3lab.experiments.lifecycle import about, begun_run, shared_facts, tracked
    from eagle3lab.extract.self_test import self_test_line
    from eagle3lab.training.build import build_data, build_module
    from eagle3lab.training.clock import process_seconds
    from eagle3lab.training.peers import agree
    from eagle3lab.training.replicas import meet_others, micro_batches_per_update, num_replicas
    from eagle3lab.training.report import closing_lines, start_lines
    from eagle3lab.training.tracker_log import TrackerLog
    from eagle3lab.training.trainer import fit
    from eagle3lab.verifier.facts import read_facts
    from eagle3lab.verifier.locate import locate_verifier
    from eagle3lab.verifier.weights import load_edge_weights

    hardware = cfg.hardware
    replicas = num_replicas(hardware)
    meet_others()  # from here on they end together
    micro_batches = micro_batches_per_update(cfg.train, replicas)
    facts = read_facts(locate_verifier(cfg.model, quiet=not is_rank_zero()))
    store = _matching_store(cfg, invocation, facts, aux_layer_ids)
    data = build_data(store, aux_layer_ids, hardware, cfg.train, cfg.draft, cfg.loss, cfg.noise)
    updates = data.plan(cfg.train, num_replicas=replicas, micro_batches=micro_batches)
    counts = data.token_counts()
    vocabulary = DraftVocabulary.from_counts(counts, plan.size.vocab_size, always_keep=facts.eos_token_ids)

    run_dir = Path(str(cfg.run_dir))
    agree(shared_facts(cfg, invocation, store.manifest))
    with begun_run(cfg, invocation, run_dir, store.manifest) as provenance:
        say = print if is_rank_zero() else (lambda *_: None)
        say(start_lines(cfg, plan, updates, run_dir, vocabulary.coverage(counts), data))
        if is_rank_zero() and not (cfg.resume and cfg.train.self_test):
            device, trusted = hardware.accelerator.value, cfg.model.trust_remote_code
            num_rows = cfg.train.self_test_rows if cfg.train.self_test else 0
            say(self_test_line(store, facts, num_rows=num_rows, device=device, trust_remote_code=trusted))

        edge = load_edge_weights(facts)
        new_draft = partial(
            build_draft, cfg.draft, facts, edge, vocabulary, aux_layer_ids, seed=cfg.train.seed
        )
        draft = new_draft(attention=hardware.attention.value)
        meter = _acceptance_meter(cfg, facts, store, new_draft)
        if meter:
            say(meter.description)
        module = build_module(
            draft,
            updates,
            data,
            hardware=hardware,
            ttt_steps=cfg.draft.ttt_steps,
            loss=cfg.loss,
            optim=cfg.optim,
            noise=cfg.noise,
            seed=cfg.train.seed,
            vocabulary=vocabulary,
            edge=edge,
            rms_norm_eps=facts.rms_norm_eps,
            step=cfg.draft.step,
        )
        with tracked(cfg, invocation, run_dir, provenance) as (tracker, results):
            summary = fit(
                module,
                data,
                hardware=hardware,
                train=cfg.train,
                run_dir=run_dir,
                loggers=[TrackerLog(tracker)] if tracker else [],
                resume=cfg.resume,
                resume_command=invocation.resume_command(run_dir),
                about=about(cfg, provenance, tracker),
                needed_flops=flops_counter(cfg.draft, shapes, len(aux_layer_ids)),
                seconds_before=invocation.seconds_before(process_seconds()),
                measure_acceptance=meter.measure if meter else None,
            )
            if not is_rank_zero():
                return None
            results.update(summary.for_tracker())
            exported_update = _export(cfg, draft, run_dir, summary, provenance)
            choice = invocation.groups().get("model", "local")
            print(closing_lines(cfg, summary, run_dir, exported_update, choice, facts.architecture))
        return results.get("val/simulated_acceptance_length")


def _matching_store(
    cfg: TrainRoot, invocation: Invocation, facts: VerifierFacts, aux_layer_ids: tuple[int, ...]
) -> StoreReader:
    """The run's store, held against the verifier, the draft's layers and the template's arguments."""
    from eagle3lab.extract.on_demand import open_store
    from eagle3lab.extract.pipeline import verifier_identity
    from eagle3lab.store.manifest import check_identity, check_template_args

    store = open_store(cfg, invocation)
    check_identity(store.manifest, verifier_identity(facts, cfg.model.name), aux_layer_ids)
    check_template_args(store.manifest, cfg.model.template_args)
    return store


def _export(
    cfg: TrainRoot,
    draft: Eagle3DraftModel,
    run_dir: Path,
    summary: TrainingSummary,
    provenance: dict[str, Any],
) -> int:
    """Put the best checkpoint's weights, else the last's, into `draft` and export it; returns their update."""
    from eagle3lab.experiments.lifecycle import finish_run
    from eagle3lab.training.checkpoint_state import load_weights
    from eagle3lab.training.weight_average import weights_label

    update = load_weights(draft, Path(summary.best_checkpoint or summary.last_checkpoint))
    exported = {"exported_update": update, "exported_weights": weights_label(cfg.optim)}
    finish_run(cfg, draft, run_dir, summary.to_json() | exported, provenance)
    return update


def _acceptance_meter(
    cfg: TrainRoot, facts: VerifierFacts, store: StoreReader, new_draft: Callable[..., Eagle3DraftModel]
) -> DraftMeter | None:
    """What decodes while training runs, where it is asked for: on the first rank."""
    if not cfg.train.acceptance.every_updates or not is_rank_zero():
        return None
    from eagle3lab.evaluate.meter import open_meter

    return open_meter(
        cfg.train.acceptance,
        model=cfg.model,
        hardware=cfg.hardware,
        facts=facts,
        store=store,
        draft=new_draft(attention="sdpa"),
        ttt_steps=cfg.draft.ttt_steps,
    )


def run_evaluate(cfg: EvaluateRoot, invocation: Invocation) -> float | None:
    """A draft and prompts -> real acceptance by decoding; returns the acceptance length at the largest k."""
    from eagle3lab.config.invocation import evaluation_directory
    from eagle3lab.engines.devices import apply_environment, resolve_hardware

    hardware = resolve_hardware(cfg.hardware)
    apply_environment(hardware)
    draft = invocation.path(cfg.draft_dir)
    out = evaluation_directory(cfg, invocation)
    from rich.console import Console

    from eagle3lab.evaluate.plot import plot_acceptance
    from eagle3lab.evaluate.report import figures, results_table, summary_figures
    from eagle3lab.evaluate.run import evaluate_draft
    from eagle3lab.experiments.evaluation_run import simulated_acceptance, track_evaluation

    started = time.perf_counter()
    evaluation = evaluate_draft(
        draft=draft,
        model=absolute_model(cfg.model, invocation),
        hardware=hardware,
        prompts=dataclasses.replace(cfg.prompts, path=invocation.text(cfg.prompts.path)),
        decode=cfg.decode,
        out=out,
        simulated=simulated_acceptance(draft),
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(results_table(evaluation))
    for stage, seconds in stage_seconds(draft, time.perf_counter() - started):
        print(f"  {stage:<20} {seconds:8.1f} s")
    plot, (columns, rows) = plot_acceptance(evaluation, out), figures(evaluation)
    track_evaluation(
        cfg.logger.wandb, out, evaluation.setup, summary_figures(evaluation), columns, rows, plot
    )
    print(f"figures {out / 'evaluation.json'}, plot {plot}")
    return evaluation.variant(k=max(cfg.decode.k)).overall.acceptance_length
