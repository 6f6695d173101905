"""The three commands: `run_extract`, `run_train`, `run_evaluate`. The only place that exits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from eagle3lab.config import compose, names
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import EXIT_USER_ERROR, UserError, raise_all
from eagle3lab.config.plan import plan_extraction, plan_training
from eagle3lab.config.plan_text import describe_extraction, describe_training, require_fit
from eagle3lab.config.schema import (
    DataConfig,
    EvaluateRoot,
    ExtractorConfig,
    ExtractRoot,
    ModelConfig,
    PromptsConfig,
    Shapes,
    TrainRoot,
)
from eagle3lab.config.stamp import is_rank_zero, run_stamp
from eagle3lab.experiments.messages import changed_lines, closing_lines, stage_seconds, start_lines
from eagle3lab.experiments.plots import plot_curves
from eagle3lab.experiments.provenance import collect
from eagle3lab.experiments.run_dir import CONFIG, PROVENANCE, SUMMARY, claim, write_json
from eagle3lab.experiments.tracking import build_wandb
from eagle3lab.store.files import write_text

if TYPE_CHECKING:
    from eagle3lab.draft.speculators_model import Eagle3DraftModel
    from eagle3lab.store.manifest import Manifest
    from eagle3lab.store.reader import StoreReader
    from eagle3lab.training.summary import TrainingSummary

_QUIET = "EAGLE3LAB_QUIET_ERRORS"
ON_DEMAND_SECONDS = 600.0  # what the other ranks wait for the tiny verifier's store


@dataclass(frozen=True)
class Invocation:
    """What Hydra knows about this job and the typed configuration does not say."""

    cwd: Path = field(default_factory=Path.cwd)
    overrides: tuple[str, ...] = ()
    choices: dict[str, str | None] = field(default_factory=dict)
    sweep_dir: Path | None = None
    job_num: int = 0

    @classmethod
    def current(cls) -> Invocation:
        config = HydraConfig.get()
        sweeping = config.mode is RunMode.MULTIRUN
        cwd = Path(config.runtime.cwd)
        return cls(
            cwd=cwd,
            overrides=tuple(config.overrides.task),
            choices=dict(config.runtime.choices),
            sweep_dir=cwd / config.sweep.dir if sweeping else None,
            job_num=config.job.num if sweeping else 0,
        )

    def path(self, text: str) -> Path:
        """A path of the configuration, taken from the directory of the call."""
        return (self.cwd / Path(text).expanduser()).absolute()

    def groups(self) -> dict[str, str]:
        order = (
            "model",
            "data",
            "hardware",
            "noise",
            "draft",
            "loss",
            "optim",
            "logger",
            "prompts",
            "experiment",
        )
        return {group: str(self.choices[group]) for group in order if self.choices.get(group)}


def main(entry: str) -> None:
    """Run `train`, `extract` or `evaluate` under Hydra. A user's mistake: one message, exit code 2."""
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1" and _QUIET not in os.environ
    if not show_traceback:  # makes Hydra raise instead of exiting with 1, so that the message is made here
        os.environ["HYDRA_FULL_ERROR"] = os.environ[_QUIET] = "1"
    compose.register()
    sys.argv[1:] = compose.command_line(entry, sys.argv[1:])
    run = {"train": run_train, "extract": run_extract, "evaluate": run_evaluate}[entry]

    def task(cfg: DictConfig) -> float | None:
        invocation = Invocation.current()
        try:
            typed, problems = compose.to_typed(cfg, compose.ROOTS[entry])
            raise_all([*problems, *(CHECKS[entry](typed) if typed is not None else [])])
            return run(typed, invocation)
        except UserError as error:
            if invocation.sweep_dir is not None or show_traceback:
                raise
            _exit_with(error)

    decorated: Callable[[], Any] = hydra.main(str(compose.config_directory()), entry, version_base="1.3")(
        task
    )
    try:
        decorated()
    except UserError as error:
        if show_traceback:
            raise
        _exit_with(error)
    except Exception as error:
        if show_traceback or not compose.is_composition_error(error):
            raise
        overrides = [a for a in sys.argv[1:] if "=" in a and not a.startswith("-")]
        _exit_with(compose.explain(error, entry, overrides, CHECKS[entry]))


def _exit_with(error: UserError) -> NoReturn:
    print(f"error: {error.render()}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


def run_extract(cfg: ExtractRoot, invocation: Invocation) -> None:
    """Conversations -> rows -> hidden states -> a finished, checked store."""
    from eagle3lab.engines.devices import apply_environment, resolve_hardware

    hardware = resolve_hardware(cfg.hardware, require=not cfg.plan)
    store = invocation.path(cfg.store or names.store_name(cfg.model.name, cfg.data.name))
    shapes = _shapes(cfg.model)
    layer_ids = _layer_ids(cfg.extract.layer_ids or cfg.model.aux_layer_ids, shapes)
    plan = plan_extraction(
        shapes,
        hardware,
        num_layer_ids=len(layer_ids),
        num_devices_per_node=hardware.num_devices or 1,
        num_tokens=cfg.data.max_tokens,
    )
    if cfg.plan:
        print(describe_extraction(plan, hardware, invocation.groups()))
    require_fit(plan, hardware)
    if cfg.plan:
        return
    apply_environment(hardware)
    from eagle3lab.extract.pipeline import extract_store

    report = extract_store(
        model=cfg.model,
        data=_absolute(cfg.data, invocation),
        extract=cfg.extract,
        hardware=hardware,
        store=store,
    )
    print(report.describe())


def run_train(cfg: TrainRoot, invocation: Invocation) -> float | None:
    """A store -> a trained draft, its curves and its export; returns the simulated acceptance length."""
    cfg = _with_names(cfg, invocation)
    from eagle3lab.engines.devices import apply_environment, resolve_hardware

    cfg.hardware = hardware = resolve_hardware(cfg.hardware, require=not cfg.plan)
    raise_all(CHECKS["train"](cfg))  # once more: the devices and the attention are known now
    shapes = _shapes(cfg.model)
    aux_layer_ids = _layer_ids(cfg.draft.aux_layer_ids or cfg.model.aux_layer_ids, shapes)
    plan = plan_training(
        cfg.draft,
        shapes,
        hardware,
        cfg.train,
        num_aux=len(aux_layer_ids),
        num_devices_per_node=hardware.num_devices or 1,
        store_tokens=_store_tokens(Path(str(cfg.store))),
    )
    if cfg.plan:
        print(describe_training(plan, hardware, invocation.groups()))
    require_fit(plan, hardware)
    if cfg.plan:
        return None
    apply_environment(hardware)

    from eagle3lab.draft.speculators_model import build_draft
    from eagle3lab.draft.vocabulary import DraftVocabulary
    from eagle3lab.extract.pipeline import verifier_identity
    from eagle3lab.extract.self_test import self_test_store
    from eagle3lab.store.manifest import check_identity
    from eagle3lab.training.build import build_module
    from eagle3lab.training.datamodule import Eagle3DataModule
    from eagle3lab.training.replicas import micro_batches_per_update, num_replicas
    from eagle3lab.training.trainer import fit
    from eagle3lab.verifier.facts import read_facts
    from eagle3lab.verifier.locate import locate_verifier
    from eagle3lab.verifier.weights import load_edge_weights

    replicas = num_replicas(hardware)
    micro_batches = micro_batches_per_update(cfg.train, replicas)
    verifier = locate_verifier(cfg.model, quiet=not is_rank_zero())
    facts = read_facts(verifier)
    store = _open_store(cfg, invocation)
    check_identity(store.manifest, verifier_identity(facts, cfg.model.name), aux_layer_ids)
    data = Eagle3DataModule(
        store,
        seq_len=cfg.train.seq_len,
        seed=cfg.train.seed,
        aux_layer_ids=aux_layer_ids,
        num_threads=hardware.num_loader_threads,
    )
    vocabulary = DraftVocabulary.from_counts(
        store.token_counts(), plan.size.vocab_size, always_keep=facts.eos_token_ids
    )
    updates = data.plan(cfg.train, num_replicas=replicas, micro_batches=micro_batches)

    run_dir = Path(str(cfg.run_dir))
    provenance = _begin_run(cfg, invocation, run_dir, store.manifest) if is_rank_zero() else {}
    say = print if is_rank_zero() else (lambda *_: None)
    say(start_lines(cfg, plan, updates, run_dir, vocabulary.coverage(store.token_counts())))
    if cfg.train.self_test and is_rank_zero() and not cfg.resume:
        report = self_test_store(
            store,
            verifier,
            facts,
            num_rows=cfg.train.self_test_rows,
            device=hardware.accelerator.value,
            trust_remote_code=cfg.model.trust_remote_code,
        )
        say(f"alignment self-test passed: {report}")
    elif not cfg.train.self_test:
        say(
            "alignment self-test: SWITCHED OFF (train.self_test=false); a store taken one layer off would not be noticed"
        )

    edge = load_edge_weights(facts)
    draft = build_draft(
        cfg.draft,
        facts,
        edge,
        vocabulary,
        aux_layer_ids,
        attention=hardware.attention.value,
        seed=cfg.train.seed,
    )
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
    )
    with _tracked(cfg, invocation, run_dir, provenance) as (loggers, results):
        summary = fit(
            module,
            data,
            hardware=hardware,
            train=cfg.train,
            run_dir=run_dir,
            loggers=loggers,
            resume=cfg.resume,
        )
        if not is_rank_zero():
            return None
        results.update(summary.best_validation or summary.last_validation)
        _finish_run(
            cfg, draft, summary, run_dir, provenance, invocation.groups().get("model", cfg.model.name)
        )
    return results.get("val/simulated_acceptance_length")


def run_evaluate(cfg: EvaluateRoot, invocation: Invocation) -> float | None:
    """A draft and prompts -> real acceptance by decoding; returns the acceptance length at the largest k."""
    from eagle3lab.engines.devices import apply_environment, resolve_hardware

    hardware = resolve_hardware(cfg.hardware)
    apply_environment(hardware)
    draft = invocation.path(cfg.draft_dir)
    out = invocation.path(cfg.out) if cfg.out else draft.parent / f"evaluation-{cfg.prompts.name}"
    from rich.console import Console

    from eagle3lab.evaluate.report import plot_acceptance, results_table
    from eagle3lab.evaluate.run import evaluate_draft

    started = time.perf_counter()
    evaluation = evaluate_draft(
        draft=draft,
        model=cfg.model,
        hardware=hardware,
        prompts=_absolute_prompts(cfg.prompts, invocation),
        decode=cfg.decode,
        out=out,
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(results_table(evaluation))
    for stage, seconds in stage_seconds(draft, time.perf_counter() - started):
        print(f"  {stage:<20} {seconds:8.1f} s")
    print(f"figures {out / 'evaluation.json'}, plot {plot_acceptance(evaluation, out)}")
    return evaluation.variant(k=max(cfg.decode.k)).overall.acceptance_length


def _open_store(cfg: TrainRoot, invocation: Invocation) -> StoreReader:
    """The run's store; the tiny verifier's default one is made here when it is missing."""
    from eagle3lab.store.manifest import is_complete
    from eagle3lab.store.reader import StoreReader

    path = Path(str(cfg.store))
    command = "python extract.py " + " ".join(
        word
        for word in invocation.overrides
        if word.partition("=")[0].partition(".")[0] in ("model", "data", "hardware")
    )
    default = path == invocation.path(names.store_name(cfg.model.name, cfg.data.name))
    if cfg.model.extract_on_demand and default and not is_complete(path):
        if is_rank_zero():
            from eagle3lab.extract.pipeline import extract_store

            print(f"no store yet: extracting the {cfg.model.name} verifier's (seconds)")
            extract_store(
                model=cfg.model, data=cfg.data, extract=ExtractorConfig(), hardware=cfg.hardware, store=path
            )
        else:
            _wait_for(lambda: is_complete(path), ON_DEMAND_SECONDS, f"rank 0 to finish the store {path}")
    suffix = "" if default else f" store={path}"
    return StoreReader(path, extract_command=f"{command.strip()}{suffix}")


def _plain(cfg: TrainRoot) -> dict[str, Any]:
    """The configuration as nested plain data, enums by name."""
    content = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _wait_for(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise UserError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)


def _begin_run(cfg: TrainRoot, invocation: Invocation, run_dir: Path, manifest: Manifest) -> dict[str, Any]:
    """Claim the run directory; write the resolved configuration and where everything came from."""
    claim(run_dir, resume=cfg.resume)
    provenance = collect(overrides=invocation.overrides, choices=invocation.choices)
    provenance["store"] = {
        "path": str(cfg.store),
        "manifest_hash": hashlib.sha256(manifest.to_json().encode()).hexdigest(),
    }
    text = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    if cfg.resume:
        for line in changed_lines((run_dir / CONFIG).read_text(encoding="utf-8"), text):
            print(f"resume: the stored configuration differs: {line}")
    else:
        write_text(run_dir / CONFIG, text)
        write_json(run_dir / PROVENANCE, provenance)
    return provenance


@contextmanager
def _tracked(
    cfg: TrainRoot, invocation: Invocation, run_dir: Path, provenance: dict[str, Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Loggers for `fit`, and the results to leave as the tracker's summary; closed also when the run fails."""
    from eagle3lab.training.tracker_log import TrackerLog

    results: dict[str, Any] = {}
    tracker = None
    if is_rank_zero():
        tracker = build_wandb(
            cfg.logger.wandb,
            run_dir=run_dir,
            run_name=str(cfg.run_name),
            config={**_plain(cfg), "provenance": provenance},
            tags=[f"{group}:{option}" for group, option in invocation.groups().items()],
            group=str(invocation.sweep_dir.name) if invocation.sweep_dir else None,
        )
    failed = True
    try:
        yield ([TrackerLog(tracker)] if tracker else []), results
        failed = False
    finally:
        if tracker:
            tracker.finish(results, failed=failed)


def _finish_run(
    cfg: TrainRoot,
    draft: Eagle3DraftModel,
    summary: TrainingSummary,
    run_dir: Path,
    provenance: dict[str, Any],
    model_option: str,
) -> None:
    """Export the best draft, draw the curves, write the summary, say what to type next."""
    from eagle3lab.draft.export import export_draft
    from eagle3lab.training.checkpoint_state import load_weights

    chosen = Path(summary.best_checkpoint or summary.last_checkpoint)
    num_updates = load_weights(draft, chosen)
    export_draft(
        draft,
        run_dir / "draft",
        {**provenance, "run_name": cfg.run_name, "updates": num_updates},
    )
    plot_curves(run_dir / "metrics.csv", run_dir / "curves.png", str(cfg.run_name))
    write_json(run_dir / SUMMARY, summary.to_json())
    print(closing_lines(cfg, summary, run_dir, num_updates, model_option))


def _with_names(cfg: TrainRoot, invocation: Invocation) -> TrainRoot:
    """Fill the default store, run name and run directory; every path becomes absolute."""
    run_name = cfg.run_name or names.run_name(cfg, invocation.overrides)
    if cfg.run_dir:
        run_dir = invocation.path(cfg.run_dir)
    elif invocation.sweep_dir is not None:
        run_dir = invocation.sweep_dir / f"{invocation.job_num:02d}-{run_name}"
    else:
        run_dir = invocation.path(cfg.outputs) / run_name / run_stamp()
    store = invocation.path(cfg.store or names.store_name(cfg.model.name, cfg.data.name))
    return dataclasses.replace(
        cfg, run_name=run_name, run_dir=str(run_dir), store=str(store), data=_absolute(cfg.data, invocation)
    )


def _absolute_prompts(prompts: PromptsConfig, invocation: Invocation) -> PromptsConfig:
    path = prompts.path
    if path is None or path.startswith("asset:"):
        return prompts
    return dataclasses.replace(prompts, path=str(invocation.path(path)))


def _absolute(data: DataConfig, invocation: Invocation) -> DataConfig:
    paths = [p if p.startswith("asset:") else str(invocation.path(p)) for p in data.paths]
    return dataclasses.replace(data, paths=paths)


def _shapes(model: ModelConfig) -> Shapes:
    """The configured shapes, else those of the checkpoint's config.json."""
    if model.shapes is not None:
        return model.shapes
    from eagle3lab.verifier.facts import read_facts
    from eagle3lab.verifier.locate import locate_verifier

    facts = read_facts(locate_verifier(model))
    fields = {f.name: getattr(facts, f.name) for f in dataclasses.fields(Shapes) if hasattr(facts, f.name)}
    return Shapes(**{**fields, "num_parameters": 0})


def _layer_ids(ids: list[int] | None, shapes: Shapes) -> tuple[int, ...]:
    from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids

    return check_aux_layer_ids(ids, shapes.num_layers) if ids else default_aux_layer_ids(shapes.num_layers)


def _store_tokens(store: Path) -> int | None:
    """Tokens of a store that exists, read from its manifest alone."""
    manifest = store / "manifest.json"
    return int(json.loads(manifest.read_text())["num_tokens"]) if manifest.is_file() else None
