"""Values that parse but cannot work. Every check adds a `Problem`; nothing raises before all were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bounds import positive as _positive
from .bounds import within as _within
from .check_decode import check_decode
from .check_loss import check_loss
from .check_optim import check_optim
from .check_sampling import check_sampling
from .errors import Problem
from .noise import check_noise
from .plan_sizes import llama_heads
from .schema import (
    Accelerator,
    Attention,
    Backend,
    DataConfig,
    DraftConfig,
    EvaluateRoot,
    ExtractRoot,
    HardwareConfig,
    ModelConfig,
    TrainerConfig,
    TrainRoot,
    VerifierSource,
)
from .selection import check_selection


def check_train(cfg: TrainRoot) -> list[Problem]:
    """Every problem of a training configuration."""
    return [
        *_model(cfg.model),
        *_data(cfg.data),
        *_hardware(cfg.hardware),
        *check_noise(cfg.noise),
        *_draft(cfg.draft, cfg.model),
        *check_loss(cfg.loss),
        *check_optim(cfg.optim),
        *_budget(cfg.train, cfg.hardware),
        *check_selection(cfg.train.select_by, cfg.train.early_stopping, cfg.train.acceptance),
    ]


def check_extract(cfg: ExtractRoot) -> list[Problem]:
    """Every problem of an extraction configuration."""
    e = cfg.extract
    return [
        *_model(cfg.model),
        *_data(cfg.data),
        *_hardware(cfg.hardware),
        *_positive("extract.batch_tokens", e.batch_tokens),
        *_positive("extract.shard_tokens", e.shard_tokens),
        *_positive("extract.num_parts", e.num_parts),
        *_part(e.part, e.num_parts),
        *_positive("extract.self_test_rows", e.self_test_rows),
        *_positive("extract.num_render_workers", e.num_render_workers, least=0),
        *_layer_ids("extract.layer_ids", e.layer_ids, cfg.model),
        *(_engine(cfg.hardware) if e.backend is not Backend.hf else ()),
    ]


def check_evaluate(cfg: EvaluateRoot) -> list[Problem]:
    """Every problem of an evaluation configuration."""
    problems = [
        *_model(cfg.model),
        *_hardware(cfg.hardware),
        *_label("prompts.name", cfg.prompts.name),
        *_positive("prompts.max_prompts", cfg.prompts.max_prompts),
        *check_decode(cfg.decode),
        *(_engine(cfg.hardware) if cfg.decode.backend is not Backend.hf else ()),
    ]
    if not cfg.draft_dir.strip() or not Path(cfg.draft_dir).expanduser().is_dir():
        problems.append(
            Problem(
                "draft is not a directory",
                cfg.draft_dir,
                "the draft/ of a training run",
                "draft=outputs/NAME/STAMP/draft",
            )
        )
    return problems


def _label(key: str, name: str) -> Iterator[Problem]:
    """A name that runs, stores and directories are called by. ORGANISATION/MODEL is one, too."""
    parts = name.split("/")
    if not name.isprintable() or any(not part.strip() or part in (".", "..") for part in parts):
        yield Problem(key, name, "a name of printable characters that is no path", f"{key}=my_{key[:-5]}")


def _model(model: ModelConfig) -> Iterator[Problem]:
    yield from _label("model.name", model.name)
    if model.source is VerifierSource.local and not model.path:
        yield Problem(
            "model.path must be given for model.source=local", fix="model.path=/directory/of/the/verifier"
        )
    if model.source is not VerifierSource.local and model.path:
        yield Problem(
            "model.path contradicts model.source",
            f"{model.path} and {model.source.value}",
            "a path only with model.source=local",
            f"model=local model.name=NAME model.path={model.path}",
        )
    yield from _layer_ids("model.aux_layer_ids", model.aux_layer_ids, model)


def _layer_ids(key: str, ids: list[int] | None, model: ModelConfig) -> Iterator[Problem]:
    if ids is None:
        return
    last = model.shapes.num_layers - 1 if model.shapes else None
    if not ids or sorted(set(ids)) != ids or ids[0] < 1 or (last is not None and ids[-1] > last):
        top = str(last) if last is not None else "n-1 of n layers"
        yield Problem(
            key, ids, f"distinct increasing ids from 1 to {top} (0 is the embedding)", f"{key}=null"
        )


def _data(data: DataConfig) -> Iterator[Problem]:
    yield from _label("data.name", data.name)
    yield from _positive("data.max_conversations", data.max_conversations)
    yield from _positive("data.max_tokens", data.max_tokens)
    yield from _positive("data.max_len", data.max_len, least=4)
    yield from check_sampling(data)
    if not 0 <= data.validation_share < 1:
        yield Problem(
            "data.validation_share", data.validation_share, "a number in [0, 1)", "data.validation_share=0.05"
        )
    if not data.paths:
        yield Problem("data.paths is empty", fix="data.paths=[conversations.jsonl]")
    for path in data.paths:
        if path != path.strip():
            yield Problem(
                "data.paths has a blank at its end",
                path,
                "the file's exact name",
                f"data.paths=['{path.strip()}']",
            )


def _hardware(hardware: HardwareConfig) -> Iterator[Problem]:
    yield from _positive("hardware.num_devices", hardware.num_devices)
    yield from _positive("hardware.num_nodes", hardware.num_nodes)
    yield from _positive("hardware.num_loader_threads", hardware.num_loader_threads, least=0)
    yield from _positive("hardware.num_threads", hardware.num_threads)
    yield from _positive("hardware.trials_per_node", hardware.trials_per_node)
    yield from _within("hardware.assumed_mfu", hardware.assumed_mfu, 0, 1, open_low=True)
    for key in ("device_memory_gib", "peak_tflops", "memory_gb_per_second", "link_gb_per_second"):
        yield from _positive(f"hardware.{key}", getattr(hardware, key), least=1e-3)
    if hardware.accelerator is Accelerator.cpu and hardware.attention is Attention.flex:
        yield Problem(
            "flex attention has no backward on CPU",
            "hardware.attention=flex",
            "sdpa or eager",
            "hardware.attention=auto",
        )

    if hardware.attention is Attention.flex and not hardware.compile:
        yield Problem("flex attention holds every score unless it is compiled", fix="hardware.compile=true")


def _engine(hardware: HardwareConfig) -> Iterator[Problem]:
    engine = hardware.engine
    yield from _positive("hardware.engine.tensor_parallel", engine.tensor_parallel)
    yield from _positive("hardware.engine.data_parallel", engine.data_parallel)
    yield from _positive("hardware.engine.cache_gib", engine.cache_gib, least=1e-3)
    yield from _within("hardware.engine.memory_share", engine.memory_share, 0, 1, open_low=True)
    needed = engine.tensor_parallel * engine.data_parallel
    if hardware.accelerator is Accelerator.cuda and hardware.num_devices and needed > hardware.num_devices:
        yield Problem(
            "hardware.engine.tensor_parallel x data_parallel",
            needed,
            f"at most hardware.num_devices={hardware.num_devices}",
            f"hardware.engine.tensor_parallel={hardware.num_devices} hardware.engine.data_parallel=1",
        )


def _part(part: int, num_parts: int) -> Iterator[Problem]:
    if num_parts >= 1 and not 0 <= part < num_parts:
        yield Problem(
            f"extract.part of extract.num_parts={num_parts}",
            part,
            f"a number from 0 to {num_parts - 1}",
            "extract.part=0",
        )


def _draft(draft: DraftConfig, model: ModelConfig) -> Iterator[Problem]:
    yield from _label("draft.name", draft.name)
    yield from _positive("draft.num_layers", draft.num_layers)
    yield from _positive("draft.vocab_size", draft.vocab_size, least=2)
    yield from _within("draft.ttt_steps", draft.ttt_steps, 1, 16)
    yield from _layer_ids("draft.aux_layer_ids", draft.aux_layer_ids, model)
    yield from _positive("draft.num_aux_layers", draft.num_aux_layers)
    if draft.num_aux_layers is not None and draft.aux_layer_ids is not None:
        yield Problem(
            "draft.num_aux_layers and draft.aux_layer_ids are both set",
            f"{draft.num_aux_layers} and {draft.aux_layer_ids}",
            "one of them",
            "draft.num_aux_layers=null",
        )
    for key in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window"):
        yield from _positive(f"draft.{key}", getattr(draft, key))
    if draft.norm_before_fc and draft.fc_norm:
        yield Problem(
            "draft.norm_before_fc and draft.fc_norm exclude each other", fix="draft.norm_before_fc=false"
        )
    heads = draft.num_heads or (model.shapes.num_heads if model.shapes else None)
    kv_heads = draft.num_kv_heads or (model.shapes.num_kv_heads if model.shapes else None)
    if heads and kv_heads and heads % kv_heads:
        yield Problem(
            "draft.num_heads",
            heads,
            f"a multiple of the {kv_heads} key-value heads",
            f"draft.num_heads={kv_heads}",
        )
    if model.shapes is not None and draft.num_heads:
        yield from llama_heads(draft, model.shapes.hidden_size, draft.num_heads)


def _budget(train: TrainerConfig, hardware: HardwareConfig) -> Iterator[Problem]:
    yield from _positive("train.seq_len", train.seq_len, least=16)
    yield from _within("train.data_share", train.data_share, 0, 1, open_low=True)
    for key in (
        "tokens_per_update",
        "max_epochs",
        "max_updates",
        "max_tokens",
        "validate_every_updates",
        "save_every_updates",
        "log_every_updates",
    ):
        yield from _positive(f"train.{key}", getattr(train, key))
    yield from _positive("train.self_test_rows", train.self_test_rows)
    yield from _within("train.seed", train.seed, 0, 2**32 - 1)
    if train.max_epochs is None and train.max_updates is None and train.max_tokens is None:
        yield Problem(
            "nothing ends the run",
            expected="train.max_epochs, train.max_updates or train.max_tokens",
            fix="train.max_epochs=1",
        )
    if hardware.attention is Attention.flex and train.seq_len % 128:
        near = max(128, round(train.seq_len / 128) * 128)
        yield Problem(
            "train.seq_len", train.seq_len, "a multiple of 128 for flex attention", f"train.seq_len={near}"
        )
    if train.tokens_per_update is not None and hardware.num_devices is not None:
        unit = train.seq_len * hardware.num_devices * hardware.num_nodes
        if train.tokens_per_update % unit:
            near = max(1, round(train.tokens_per_update / unit)) * unit
            yield Problem(
                "train.tokens_per_update",
                train.tokens_per_update,
                f"a multiple of {unit} (train.seq_len x devices x nodes)",
                f"train.tokens_per_update={near}",
            )


CHECKS: dict[str, Callable[[Any], list[Problem]]] = {
    "train": check_train,
    "extract": check_extract,
    "evaluate": check_evaluate,
}
