"""Writing a draft so that an engine serves it as it is, and reading it back."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.draft import format as draft_format
from eagle3lab.draft.belonging import CONFIG_HASH, WEIGHT_FINGERPRINT, refuse_other_verifier
from eagle3lab.draft.format import CONFIG_FILE, PROVENANCE_FILE, WEIGHTS_FILE
from eagle3lab.draft.frozen import widen_frozen
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.speculators_model import (
    UNREADABLE_CONFIG,
    assert_finite,
    draft_from_config,
    fill_verifier_target,
    vocabulary_of,
)
from eagle3lab.store.files import sha256_of
from eagle3lab.store.trained_on import TRAINED_ON_FILE
from eagle3lab.verifier.facts import VerifierFacts

if TYPE_CHECKING:
    from eagle3lab.draft.speculators_model import Eagle3DraftModel
    from eagle3lab.verifier.weights import EdgeWeights

# The verifier's own tensors, in the model for training targets only.
_NOT_EXPORTED = ("verifier_lm_head.weight", "verifier_norm.weight")
_LOOKED_UP = "embed_tokens.weight"
_CHECK_STEPS = 3
_CHECK_ROWS = 24


def export_draft(
    model: Eagle3DraftModel,
    directory: Path,
    provenance: Mapping[str, Any],
    *,
    verifier_name: str | None = None,
    verifier_fingerprint: str | None = None,
    trained_on: Path | None = None,
) -> None:
    """Write config.json, model.safetensors and provenance.json, read them back, then move them in place.

    An earlier export in `directory` is replaced only after the new one passed. Weights keep the dtype of
    the trained ones; the embedding is included, so a reader needs no verifier (vLLM shares it with the verifier's
    where the two are equal). `verifier_name` replaces the path the verifier was read from, and
    `verifier_fingerprint` (see `weight_fingerprint`) tells its weights from others of the same shapes.
    `trained_on`: the store's `TRAINED_ON_FILE`, which goes along.
    Raises IntegrityError when what was written is not what was trained.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    widen_frozen(model)
    config = _exported_config(model, verifier_name, verifier_fingerprint)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name not in _NOT_EXPORTED
    }
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write_json(staging / CONFIG_FILE, config)
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors writes for the owner alone, whatever the umask.
        (staging / WEIGHTS_FILE).chmod((staging / CONFIG_FILE).stat().st_mode)
        _sync(staging / WEIGHTS_FILE)
        said = {**provenance, "verifier": _identity(config)}
        if trained_on is not None:
            shutil.copyfile(trained_on, staging / TRAINED_ON_FILE)
            _sync(staging / TRAINED_ON_FILE)
            said[TRAINED_ON_FILE] = {"sha256": sha256_of(staging / TRAINED_ON_FILE)}
        _write_json(staging / PROVENANCE_FILE, said)
        _sync(staging)
        _compare_with(model, staging)
        staging.chmod(0o755)
        _replace_directory(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_draft(
    directory: Path,
    facts: VerifierFacts,
    edge: EdgeWeights,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> Eagle3DraftModel:
    """An exported draft on the CPU, with the verifier's norm and head in place for further training.

    Another `dtype` is for decoding: weights are cast, rotary frequencies are not (`model.to(dtype)` would).

    The vocabulary is the file's. Raises UserError when the directory is none or the draft belongs to
    another verifier (every reason at once), IntegrityError when its files are damaged.
    """
    directory = Path(directory)
    config, tensors = read_export(directory)
    refuse_other_verifier(directory, config, tensors, facts, edge)
    # copies: the file may be written over while its draft is in use
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        model = _model_from(config, copies, attention)
    except (*UNREADABLE_CONFIG, RuntimeError) as error:  # RuntimeError: it names tensors that are not there
        raise IntegrityError(Problem(f"{directory / CONFIG_FILE} is not a draft's", str(error))) from error
    fill_verifier_target(model, edge, vocabulary_of(model))
    assert_finite(model)
    return _cast_weights(model, dtype)


def read_export(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of an exported draft, mapped from its file, checked the way an engine reads them.

    Raises UserError for a directory without a draft, IntegrityError naming every fault of its files.
    """
    missing = [n for n in (CONFIG_FILE, WEIGHTS_FILE) if not (directory / n).is_file()]
    if missing:
        within = directory / "draft"  # of a run directory
        is_run = (within / CONFIG_FILE).is_file()
        raise UserError(
            Problem(
                "no exported draft here",
                str(directory),
                f"a directory with {' and '.join(missing)}",
                shlex.quote(f"draft={within}") if is_run else "draft=outputs/<run_name>/<stamp>/draft",
            )
        )
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS_FILE)
    except (ValueError, RecursionError, SafetensorError) as error:
        raise IntegrityError(Problem(f"{directory} cannot be read", str(error))) from error
    if not isinstance(config, dict):
        raise IntegrityError(
            Problem(f"{directory / CONFIG_FILE} holds a {type(config).__name__}", None, "a JSON object")
        )
    problems = draft_format.config_problems(config)
    if not problems:
        problems = draft_format.tensor_problems(draft_format.engine_view(config), tensors)
    if problems:
        raise IntegrityError(Problem(f"the draft in {directory} cannot be served"), *problems)
    return config, tensors


def _exported_config(
    model: Any, verifier_name: str | None, verifier_fingerprint: str | None
) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string())
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    if verifier_name is not None:
        config["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    if verifier_fingerprint is not None:
        config[WEIGHT_FINGERPRINT] = verifier_fingerprint
    return config


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    layer, verifier = config["transformer_layer_config"], config["speculators_config"]["verifier"]
    return {
        "name_or_path": verifier["name_or_path"],
        "architectures": verifier["architectures"],
        "config_hash": config.get(CONFIG_HASH),
        "weight_fingerprint": config.get(WEIGHT_FINGERPRINT),
        "hidden_size": layer["hidden_size"],
        "vocab_size": layer["vocab_size"],
        "aux_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
    }


def _model_from(config: Mapping[str, Any], tensors: Mapping[str, Tensor], attention: str) -> Eagle3DraftModel:
    """A draft that holds these very tensors, cast where it has another dtype; the verifier's are still missing."""
    model = draft_from_config(config, attention=attention)
    own = model.state_dict()
    held = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
    # Strict but for the verifier's tensors, which no export holds.
    model.load_state_dict({**held, **{name: own[name] for name in _NOT_EXPORTED}}, assign=True)
    return model


def _cast_weights(model: Any, dtype: torch.dtype) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _compare_with(model: Any, directory: Path) -> None:
    """Raise IntegrityError unless the files give the trained model back: settings, RoPE, maps, logits."""
    config, tensors = read_export(directory)
    faults = [
        Problem(f"{CONFIG_FILE} says another {name}", read, repr(trained))
        for name, trained in _settings_of(model).items()
        if (read := getattr(draft_format.engine_view(config), name)) != trained
    ]
    device = next(model.parameters()).device
    # in memory of their own, as the trained ones: the last bits of a product depend on where its factors begin
    held = {name: tensor if name == _LOOKED_UP else tensor.clone() for name, tensor in tensors.items()}
    reread: Any = _model_from(config, held, "sdpa").to(device)
    _cast_weights(reread, next(model.parameters()).dtype)
    if not torch.equal(reread.rotary_emb.inv_freq, model.rotary_emb.inv_freq):
        faults.append(Problem("the re-read draft rotates with other frequencies"))
    if not vocabulary_of(reread).same_as(vocabulary_of(model)):
        faults.append(Problem("the re-read draft has another vocabulary"))
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(_CHECK_ROWS, model.fc.in_features, generator=generator).to(
        device, model.fc.weight.dtype
    )
    tokens = torch.randint(model.verifier_vocab_size, (_CHECK_ROWS,), generator=generator).to(device)
    with _dense_attention(model):
        trained_logits = _logits(model, aux, tokens)
    difference = float((trained_logits - _logits(reread, aux, tokens)).abs().max())
    if difference != 0.0:
        faults.append(Problem("logits of the re-read draft differ from the trained one's", difference, "0"))
    if faults:
        raise IntegrityError(Problem("the export is not the trained draft"), *faults)


def _settings_of(model: Any) -> dict[str, Any]:
    """What the module itself does, where config.json could say otherwise."""
    return {
        "aux_layer_ids": tuple(model.target_layer_ids),
        "num_aux": model.fc.in_features // model.hidden_size,
        "hidden_size": model.embed_tokens.embedding_dim,
        "vocab_size": model.embed_tokens.num_embeddings,
        "draft_vocab_size": model.lm_head.out_features,
        "num_layers": len(model.layers),
        "norm_before_residual": model.layers[0].norm_before_residual,
        "norm_before_fc": model.input_norm is not None,
        "fc_norm": model.fc_norm is not None,
    }


def _logits(model: Any, aux: Tensor, tokens: Tensor) -> Tensor:
    """Logits of every step-0 position and of a short chain behind the last. `[rows + steps, Vd]`"""
    drafter = ChainDrafter(model)
    first = drafter.logits(drafter.extend(aux, tokens))
    return torch.cat([first, drafter.propose_with_logits(_CHECK_STEPS)[1]])


@contextlib.contextmanager
def _dense_attention(model: Any) -> Iterator[None]:
    """Run the layers with sdpa for a moment: block masks do not fit an incremental pass."""
    layer_config = model.config.transformer_layer_config
    trained_with = layer_config._attn_implementation
    layer_config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        layer_config._attn_implementation = trained_with


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_directory(new: Path, target: Path) -> None:
    """Move a finished directory in place. An old one is moved aside first: a directory cannot be replaced."""
    aside = new.with_name(f"{new.name}.old")
    replaced = target.exists()
    if replaced:
        os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        if replaced:
            os.rename(aside, target)
        raise
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
