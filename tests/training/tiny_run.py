"""A tiny verifier, store and draft for training tests. Loaded by path, also from scripts that torchrun starts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger

from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.config.schema import (
    Accelerator,
    Attention,
    DraftConfig,
    HardwareConfig,
    LossConfig,
    OptimConfig,
    Schedule,
    Strategy,
    TrainerConfig,
    TrainingStep,
)
from eagle3lab.data.noise import build_noise
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.ttt import LossRecorder
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.rows.rows import Row
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter
from eagle3lab.training.datamodule import Eagle3DataModule
from eagle3lab.training.module import Eagle3Module
from eagle3lab.training.replicas import micro_batches_per_update, num_replicas
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights

HIDDEN, VOCAB, SEQ_LEN, TTT_STEPS = 64, 128, 32, 3
AUX_IDS = (2, 4, 5)

FACTS = VerifierFacts(
    path=Path("verifier"),
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_positions=512,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False,
    norm_offset=0.0,
    bos_token_id=0,
    eos_token_ids=(1,),
    pad_token_id=None,
    config_hash="0" * 64,
)
VOCABULARY = DraftVocabulary.from_ids(range(0, VOCAB, 2), VOCAB)


def edge_weights() -> EdgeWeights:
    g = torch.Generator().manual_seed(5)
    return EdgeWeights(
        embedding=torch.randn(VOCAB, HIDDEN, generator=g),
        head=torch.randn(VOCAB, HIDDEN, generator=g) * 0.2,
        norm=torch.rand(HIDDEN, generator=g) + 0.5,
    )


def make_row(length: int, split: str, number: int, supervised_from: int | None = None) -> Row:
    """A row of random ids, supervised from a position on (default: a random one; `length`: nowhere)."""
    rng = random.Random(number)
    ids = tuple(rng.randrange(VOCAB) for _ in range(length))
    first = rng.randrange(1, length) if supervised_from is None else supervised_from
    mask = tuple(int(i >= first) for i in range(length))
    return Row(row_id_of(ids, mask), f"conversation{number}", f"rows:{number}", split, ids, mask)


def default_rows(num_train: int = 12, num_validation: int = 3) -> list[Row]:
    rng = random.Random(7)
    splits = ["train"] * num_train + ["validation"] * num_validation
    return [make_row(rng.randrange(9, 30), split, i) for i, split in enumerate(splits)]


def write_store(
    path: Path, rows: list[Row], dtype: str = "float32", last_state_rows: str = "all"
) -> StoreReader:
    identity = VerifierIdentity("LlamaForCausalLM", "0" * 64, "1" * 64, HIDDEN, 8, VOCAB, "tiny")
    manifest = Manifest(
        verifier=identity,
        tokenizer_hash="t",
        template_hash="t",
        template_args_hash="t",
        layer_ids=AUX_IDS,
        last_state_rows=last_state_rows,
        dtype=dtype,
        engine={"name": "test"},
    )
    g = torch.Generator().manual_seed(11)
    with StoreWriter(path, manifest, rows, shard_tokens=128) as writer:
        for number, planned in writer.pending():
            states = []
            for row in planned:
                length = len(row.input_ids)
                aux = torch.randn(length, len(AUX_IDS) * HIDDEN, generator=g)
                last = torch.randn(length, HIDDEN, generator=g) * 3
                states.append((row, aux, last, torch.tensor(row.input_ids)))
            if dtype != "float32":  # the writer takes what a verifier gives
                states = [(row, aux.bfloat16(), last.bfloat16(), ids) for row, aux, last, ids in states]
            writer.write_shard(number, states)
        writer.finish()
    return StoreReader(path)


def hardware(devices: int = 1, strategy: Strategy = Strategy.auto, nodes: int = 1) -> HardwareConfig:
    return HardwareConfig(
        name="test",
        accelerator=Accelerator.cpu,
        num_devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        attention=Attention.sdpa,
        num_threads=1,
    )


def optim(**fields: Any) -> OptimConfig:
    return replace(OptimConfig(lr=1e-2, schedule=Schedule.constant), **fields)


def build(
    store: StoreReader,
    train: TrainerConfig,
    *,
    devices: int = 1,
    nodes: int = 1,
    noise: float | NoiseConfig = 0.0,
    threads: int = 0,
    optim: OptimConfig | None = None,
    scale: float = 4.0,
    loss: LossConfig | None = None,
    step: TrainingStep = TrainingStep.reference,
    draft: DraftConfig | None = None,
) -> tuple[Eagle3Module, Eagle3DataModule]:
    """A fresh module and data module: the same draft every time."""
    replicas = num_replicas(hardware(devices, nodes=nodes))
    loss = loss or LossConfig(step_decay=0.8)
    if not isinstance(noise, NoiseConfig):
        noise = NoiseConfig(NoiseKind.uniform if noise else NoiseKind.none, noise)
    data = Eagle3DataModule(
        store,
        seq_len=train.seq_len,
        seed=train.seed,
        num_threads=threads,
        supervision=loss.supervision,
        noise=noise,
        data_share=train.data_share,
    )
    plan = data.plan(train, num_replicas=replicas, micro_batches=micro_batches_per_update(train, replicas))
    edge = edge_weights()
    model = build_draft(
        draft or DraftConfig(name="test", ttt_steps=TTT_STEPS),
        FACTS,
        edge,
        VOCABULARY,
        AUX_IDS,
        attention="sdpa",
        seed=3,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.mul_(scale)
    module = Eagle3Module(
        model,
        plan,
        supervised_counts=data.supervised_counts(),
        ttt_steps=TTT_STEPS,
        recorder=LossRecorder(token_loss(loss)),
        pruned_loss=loss_and_gradient(loss, compiled=False) if step is TrainingStep.pruned else None,
        step_decay=loss.step_decay,
        normalisation=loss.normalisation,
        optim=optim or OptimConfig(lr=1e-2, schedule=Schedule.constant),
        vocabulary=VOCABULARY,
        edge=edge,
        rms_norm_eps=FACTS.rms_norm_eps,
        noise=build_noise(noise, data.layer_rms.typical if data.layer_rms else None),
        seed=train.seed,
    )
    return module, data


def weights(module: Eagle3Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.draft.named_parameters() if p.requires_grad}


class Stop(Exception):
    pass


class StopAt(DummyLogger):
    """Ends the run when it logs this update, which is before the update is saved: as a crash would."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self.update = update

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step == self.update:
            raise Stop
