"""The verifier's tokenizer with the chat template in use, and the hashes that identify both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoTokenizer

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.rows.files import resolve
from eagle3lab.rows.rows import sha256_text

Tokenizer: TypeAlias = Any  # a transformers PreTrainedTokenizerBase; custom code need not subclass it

# Files that decide which ids a text becomes. The template and the model are hashed on their own.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.tiktoken",
    "tiktoken.model",
    "tokenization_*.py",
)
# Keys of tokenizer_config.json without influence on unpadded ids.
PRESENTATION_KEYS = (
    "chat_template",
    "padding_side",
    "pad_token",
    "truncation_side",
    "model_max_length",
    "name_or_path",
    "is_local",
    "processor_class",
    "transformers_version",
)


def tokenizer_directory(model: ModelConfig, path: Path) -> Path:
    """`model.tokenizer` where given, else the verifier's own directory `path`."""
    return path if model.tokenizer is None else resolve(model.tokenizer)


def load_tokenizer(model: ModelConfig, path: Path) -> Tokenizer:
    """The tokenizer of the verifier in `path` with its chat template.

    The template is `model.template` where given, else the tokenizer's own, else the verifier's.

    Code that comes with a tokenizer runs only with `model.trust_remote_code`. Raises UserError when
    the directory holds no loadable tokenizer, wants to run code, or has no chat template.
    """
    directory = tokenizer_directory(model, path)
    if not directory.is_dir():
        raise UserError(
            Problem("model.tokenizer: no such directory", str(directory), fix="model.tokenizer=DIRECTORY")
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # damaged files raise anything, plain Exception included
        raise UserError(_load_problem(directory, model, error)) from error
    if model.template is not None:
        tokenizer.chat_template = _read_template(model.template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = _shipped_template(path)
    if not tokenizer.chat_template:
        raise UserError(
            Problem("the tokenizer has no chat template", str(directory), fix="model.template=FILE.jinja")
        )
    return tokenizer


def _load_problem(directory: Path, model: ModelConfig, error: Exception) -> Problem:
    if not model.trust_remote_code and ("trust_remote_code" in str(error) or _brings_code(directory)):
        what = "the tokenizer comes with code of its own, which is not run unless allowed"
        return Problem(what, str(directory), "a decision of yours", "model.trust_remote_code=true")
    detail = f"{directory}: {type(error).__name__}: {error}"
    return Problem(
        "cannot load the tokenizer", detail, "a Hugging Face tokenizer", "model.tokenizer=DIRECTORY"
    )


def _brings_code(directory: Path) -> bool:
    """Whether the tokenizer names a class of its own: transformers may fail at the model's configuration before."""
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        return "AutoTokenizer" in settings.get("auto_map", {})
    except (OSError, ValueError, AttributeError):  # the error that is being explained says more
        return False


def _read_template(spec: str) -> str:
    path = resolve(spec)
    if not path.is_file():
        raise UserError(Problem("model.template: no such file", spec, fix="model.template=FILE.jinja"))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            Problem(f"model.template: {spec} is not UTF-8", str(error), "a UTF-8 file")
        ) from error
    if text.startswith("\ufeff"):  # rendered as it is, here and in an engine
        expected = "a template without it: it would begin every prompt"
        raise UserError(Problem(f"model.template: {spec} begins with a byte order mark", expected=expected))
    return text


def _shipped_template(path: Path) -> Any:
    """The template that lies beside the verifier's weights, for a tokenizer that brings none."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    return json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None


def template_text(tokenizer: Tokenizer) -> str:
    """The chat template; a tokenizer with several named ones gives them all as JSON."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def template_hash(tokenizer: Tokenizer) -> str:
    """sha256 of the template in use."""
    return sha256_text(template_text(tokenizer))


def template_args_hash(tokenizer: Tokenizer, model: ModelConfig) -> str:
    """sha256 of what the template is told: its arguments, and the date where it asks for one."""
    told: dict[str, Any] = {"args": dict(model.template_args)}
    if reads_clock(tokenizer):
        told["date"] = model.template_date
    return sha256_text(json.dumps(told, sort_keys=True))


def reads_clock(tokenizer: Tokenizer) -> bool:
    """Whether the template prints today's date."""
    return "strftime_now" in template_text(tokenizer)


def tokenizer_hash(model: ModelConfig, path: Path) -> str:
    """sha256 over the files that decide which ids a text becomes, by name and content.

    Independent of where the directory lies and of template, padding and length settings.
    """
    directory = tokenizer_directory(model, path)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in TOKENIZER_FILES for file in directory.glob(pattern)}):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    config = directory / "tokenizer_config.json"
    if config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        kept = {key: value for key, value in settings.items() if key not in PRESENTATION_KEYS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()


def is_other_tokenizer(model: ModelConfig, path: Path) -> bool:
    """Whether `model.tokenizer` makes other ids than the tokenizer that lies beside the verifier's weights."""
    own = (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file()
    beside = replace(model, tokenizer=None)
    return model.tokenizer is not None and own and tokenizer_hash(model, path) != tokenizer_hash(beside, path)


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Control tokens by their text: the named ones and every added token marked special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {str(token): number for number, token in added.items() if token.special}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**tokens, **dict(named)}
