"""Layer 6: the loop in miniature. The shipped tiny verifier: extract, one training step, export, load."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eagle3lab.config.schema import Accelerator, Attention, ExtractorConfig, HardwareConfig, TrainRoot

from .check import Check, Finding, Status, examine

LAYER = "miniature"
CHOICES = (
    "model=tiny",
    "data=demo",
    "hardware=cpu",
    "data.max_conversations=12",
    "data.validation_share=0",
    "draft.vocab_size=256",
    "draft.ttt_steps=2",
    "train.seq_len=256",
    "train.max_updates=1",
    "optim.lr_warmup_updates=0",
)
_REMEDY = "the checks above; if they are all ok, this is a fault of eagle3lab: HYDRA_FULL_ERROR=1 shows where"


def check_miniature(cfg: TrainRoot, accelerator: Accelerator) -> Iterator[Check]:
    """`cfg` is composed from CHOICES. One device of `accelerator`, uncompiled; everything lies in a
    temporary directory. A step that fails ends the layer: the next one needs its result."""
    hardware = dataclasses.replace(cfg.hardware, accelerator=accelerator, attention=Attention.sdpa)
    with tempfile.TemporaryDirectory(prefix="eagle3lab-doctor-") as name:
        work = Path(name)
        made: dict[str, Any] = {}
        steps: tuple[tuple[str, Callable[[], str]], ...] = (
            ("extract", partial(_extract, cfg, hardware, work)),
            ("training step", partial(_train, cfg, hardware, work, made)),
            ("export and load", partial(_export, work, made)),
        )
        for step, function in steps:
            check = examine(LAYER, step, partial(_silently, function), _REMEDY)
            yield check
            if check.status is Status.fail:
                return


def _silently(function: Callable[[], str | Finding]) -> str | Finding:
    with contextlib.redirect_stdout(io.StringIO()):
        return function()


def _extract(cfg: TrainRoot, hardware: HardwareConfig, work: Path) -> str:
    from rich.console import Console

    from eagle3lab.config.schema import Backend
    from eagle3lab.extract.pipeline import extract_store

    report = extract_store(
        model=cfg.model,
        data=cfg.data,
        extract=ExtractorConfig(backend=Backend.hf),
        hardware=hardware,
        store=work / "store",
        console=Console(file=io.StringIO()),
    )
    return f"{report.num_rows} rows of the tiny verifier, alignment self-test passed"


def _train(cfg: TrainRoot, hardware: HardwareConfig, work: Path, made: dict[str, Any]) -> str:
    """One update with the trainer of a run, over the store just made."""
    import torch

    from eagle3lab.draft.speculators_model import build_draft
    from eagle3lab.draft.vocabulary import DraftVocabulary
    from eagle3lab.store.reader import StoreReader
    from eagle3lab.training.build import build_module
    from eagle3lab.training.datamodule import Eagle3DataModule
    from eagle3lab.training.trainer import fit
    from eagle3lab.verifier.facts import read_facts
    from eagle3lab.verifier.locate import locate_verifier
    from eagle3lab.verifier.weights import load_edge_weights

    facts = read_facts(locate_verifier(cfg.model))
    store, edge = StoreReader(work / "store"), load_edge_weights(facts)
    counts = store.token_counts()
    vocabulary = DraftVocabulary.from_counts(
        counts, int(cfg.draft.vocab_size or facts.vocab_size), always_keep=facts.eos_token_ids
    )
    ids = store.manifest.layer_ids
    draft = build_draft(cfg.draft, facts, edge, vocabulary, ids, attention=hardware.attention.value, seed=0)
    before = {
        name: tensor.detach().clone() for name, tensor in draft.named_parameters() if tensor.requires_grad
    }
    data = Eagle3DataModule(
        store,
        seq_len=cfg.train.seq_len,
        aux_layer_ids=ids,
        supervision=cfg.loss.supervision,
        noise=cfg.noise,
    )
    module = build_module(
        draft,
        data.plan(cfg.train, num_replicas=1, micro_batches=1),
        data,
        hardware=hardware,
        ttt_steps=cfg.draft.ttt_steps,
        loss=cfg.loss,
        optim=cfg.optim,
        noise=cfg.noise,
        seed=0,
        vocabulary=vocabulary,
        edge=edge,
        rms_norm_eps=facts.rms_norm_eps,
    )
    summary = fit(module, data, hardware=hardware, train=cfg.train, run_dir=work / "run")
    still = [
        name
        for name, tensor in draft.named_parameters()
        if name in before and torch.equal(tensor.detach().cpu(), before[name])
    ]
    if still:
        raise RuntimeError(f"the step moved no weight of {', '.join(still)}")
    made.update(draft=draft.cpu(), facts=facts, edge=edge)
    return f"one update on {hardware.accelerator.value}, loss {summary.last['train/loss']:.3f}, every trained tensor moved"


def _export(work: Path, made: dict[str, Any]) -> str:
    """Written, re-read and compared by `export_draft`; then loaded as evaluation loads it."""
    from eagle3lab.draft.export import export_draft, load_draft

    export_draft(made["draft"], work / "draft", {"made_by": "doctor"})
    loaded = load_draft(work / "draft", made["facts"], made["edge"])
    size = sum(file.stat().st_size for file in (work / "draft").iterdir())
    return f"{size / 1e6:.1f} MB written, compared and loaded, {sum(p.numel() for p in loaded.parameters()):,} parameters"
