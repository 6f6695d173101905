"""Runs over rows of a shipped case: a store of them, the production builders, `fit`. Loaded by conftest.py."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.config.schema import (Accelerator, Attention, DraftConfig, HardwareConfig, LossConfig, OptimConfig, Precision, Schedule, TrainerConfig,)
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.extract.pipeline import verifier_identity
from eagle3lab.rows.rows import Row
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter
from eagle3lab.training.build import build_module
from eagle3lab.training.datamodule import Eagle3DataModule
from eagle3lab.training.replicas import micro_batches_per_update
from eagle3lab.config.names import METRICS
from eagle3lab.training.trainer import fit
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights

CASES = Path(__file__).parent
Columns = tuple[Tensor, Tensor, Tensor]  # ids, mask, states of one row
LENGTH = 11  # aligned positions of every row of these cases
CONSTANT = OptimConfig(lr=1e-2, schedule=Schedule.constant, grad_clip_norm=None)


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


@dataclass(frozen=True)
class Run:
    """A run over one store of rows of target_tiny."""

    store: StoreReader
    ids: Sequence[int] | None = None  # of the draft vocabulary; None: all
    num_ranks: int = 1

    def __call__(
        self,
        path: Path,
        train: TrainerConfig,
        *,
        optim: OptimConfig = CONSTANT,
        noise: float = 0.0,
        precision: Precision = Precision.fp32,
        resume: bool = False,
        loggers: tuple[Any, ...] = (),
    ) -> Any:
        """The module and the summary of `fit`."""
        hardware = HardwareConfig(
            name="case",
            accelerator=Accelerator.cpu,
            num_devices=self.num_ranks,
            attention=Attention.sdpa,
            precision=precision,
            num_threads=1,
        )
        facts = read_facts(CASES / "_shared" / "target_tiny")
        edge = load_edge_weights(facts)
        vocabulary = (
            DraftVocabulary.full(264) if self.ids is None else DraftVocabulary.from_ids(self.ids, 264)
        )
        draft = build_draft(
            DraftConfig(name="case"), facts, edge, vocabulary, (2, 4, 5), attention="sdpa", seed=0
        )
        added = NoiseConfig(NoiseKind.uniform if noise else NoiseKind.none, noise)
        data = Eagle3DataModule(self.store, seq_len=train.seq_len, seed=train.seed, noise=added)
        plan = data.plan(
            train, num_replicas=self.num_ranks, micro_batches=micro_batches_per_update(train, self.num_ranks)
        )
        module = build_module(
            draft,
            plan,
            data,
            hardware=hardware,
            ttt_steps=3,
            loss=LossConfig(),
            optim=optim,
            noise=added,
            seed=train.seed,
            vocabulary=vocabulary,
            edge=edge,
            rms_norm_eps=facts.rms_norm_eps,
        )
        summary = fit(
            module, data, hardware=hardware, train=train, run_dir=path, resume=resume, loggers=loggers
        )
        return module, summary


def make_run(
    directory: Path,
    case: str,
    *names: str,
    validation: Sequence[str] = (),
    ids: Sequence[int] | None = None,
) -> Run:
    """A `Run` over files of a case; `validation` rows are files too."""
    files = [load_file(CASES / case / f"{name}.safetensors") for name in [*names, *validation]]
    rows = [(tensors["token_ids"], tensors["loss_mask"], tensors["hidden_states"]) for tensors in files]
    path = directory / "-".join(["store", *names, "validated", *validation])
    return Run(write_store(path, rows[: len(names)], rows[len(names) :]), ids)


def write_store(path: Path, train: Sequence[Columns], validation: Sequence[Columns]) -> StoreReader:
    """A store of (ids, mask, states `[T, 4, H]`). A validation row has one supervised token less than given:
    the same row may be in both splits."""
    rows, states = [], {}
    splits = ["train"] * len(train) + ["validation"] * len(validation)
    for number, (split, (ids, loss_mask, held)) in enumerate(zip(splits, [*train, *validation], strict=True)):
        token_ids, mask = ids.tolist(), loss_mask.tolist()
        if split == "validation":
            mask[mask.index(1)] = 0
        row_id = row_id_of(token_ids, mask)
        rows.append(Row(row_id, f"{split}{number}", "case", split, tuple(token_ids), tuple(mask)))
        states[row_id] = held.float()
    facts = read_facts(CASES / "_shared" / "target_tiny")
    manifest = Manifest(
        verifier=verifier_identity(facts, "case"),
        tokenizer_hash="t",
        template_hash="t",
        template_args_hash="t",
        layer_ids=(2, 4, 5),
        dtype="float32",
        engine={"name": "case"},
    )
    with StoreWriter(path, manifest, rows, shard_tokens=128) as writer:
        for number, planned in writer.pending():
            shard = []
            for row in planned:
                held = states[row.row_id]
                shard.append(
                    (row, held[:, :3].flatten(1), held[:, 3].contiguous(), torch.tensor(row.input_ids))
                )
            writer.write_shard(number, shard)
        writer.finish()
    return StoreReader(path)


def config(**fields: Any) -> TrainerConfig:
    # without the untrained draft's validation: the cases count those that follow training
    values = {"seq_len": LENGTH, "max_epochs": None, "log_every_updates": 1, "validate_untrained": False}
    return TrainerConfig(**(values | fields))


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.draft.named_parameters() if p.requires_grad}


def largest_difference(one: Any, two: Any) -> float:
    first, second = weights(one), weights(two)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def logged(path: Path, column: str) -> list[float]:
    with (path / METRICS).open(newline="") as f:
        return [float(row[column]) for row in csv.DictReader(f) if row[column]]


def train_words(case_id: str, seq_len: int) -> list[str]:
    """The case's `train` section as words of our command line. A batch of n rows is a pack of n times `seq_len`."""
    given = yaml.safe_load((CASES / case_id / "override.yaml").read_text())["train"]
    pack = seq_len * given.pop("batch_size", 1)
    words = [f"train.seq_len={pack}"]
    for key, value in given.items():
        match key:
            case "epochs":
                words.append(f"train.max_epochs={value}")
            case "save_every_steps":
                words.append(f"train.save_every_updates={value}")
            case "seed":
                words.append(f"train.seed={value}")
            case "noise":
                words.append(f"noise={value}")
            case "drop_last":  # nothing is ever dropped
                pass
            case _:
                raise AssertionError(f"{case_id}: train.{key} has no counterpart")
    return words
