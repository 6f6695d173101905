"""Text and ids exactly as a serving engine would render them, before any mask exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from jinja2 import TemplateSyntaxError

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.rows.normalise import ENGINE_SEPARATOR
from eagle3lab.rows.tokenizer import Tokenizer, reads_clock

# Names that rendering itself passes to the template, and those that never reach it: options of apply_chat_template.
RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "strftime_now",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)

Message = Mapping[str, Any]


class Refused(Exception):
    """The template raised for this conversation."""


def template_arguments(tokenizer: Tokenizer, model: ModelConfig) -> dict[str, Any]:
    """`model.template_args` as the template gets them.

    A template that asks for today's date is told `model.template_date`, so that the same input gives
    the same ids on any day. Raises UserError for arguments that would replace rendering's own.
    """
    taken = sorted(RESERVED & set(model.template_args))
    if taken:
        raise UserError(*(Problem(f"model.template_args.{name} is set by the renderer") for name in taken))
    arguments = dict(model.template_args)
    if reads_clock(tokenizer):
        try:
            today = date.fromisoformat(model.template_date)
        except ValueError as error:
            raise UserError(
                Problem(
                    "model.template_date", model.template_date, "YYYY-MM-DD", "model.template_date=2025-01-01"
                )
            ) from error
        arguments["strftime_now"] = today.strftime
    return arguments


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    tools: list[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool,
) -> str:
    """The chat template's text for `messages`; with the generation prompt, the served prompt's.

    Raises `Refused` when the template raises, UserError when it is no valid template at all.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **arguments,
        )
    except TemplateSyntaxError as error:
        raise UserError(
            Problem("the chat template is not valid Jinja", f"line {error.lineno}: {error.message}")
        ) from error
    except Exception as error:  # the template is a program of somebody else's: it may raise anything
        raise Refused(f"{type(error).__name__}: {error}") from error
    assert isinstance(text, str)
    return text


def part_separator(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> str:
    """What stands between two text parts of one message in the served prompt.

    vLLM hands the parts to a template that walks them, which then decides itself; for one that takes a text it
    joins them by `ENGINE_SEPARATOR`, empty parts left out.
    """
    texts = ("the-first-part", "the-second-part")
    message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    try:
        rendered = render_text(tokenizer, [message], arguments, generation_prompt=True)
    except Refused:
        return ENGINE_SEPARATOR
    between, found, _ = rendered.partition(texts[0])[2].partition(texts[1])
    return between if found and "type" not in between else ENGINE_SEPARATOR


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of rendered text. The template has written every special token: none is added."""
    # verbose: lengths are capped later, with a count, so no warning about the tokenizer's own limit
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids with special tokens spelt out and nothing tidied."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    model: ModelConfig,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Ids of the served prompt: `messages` rendered with the generation prompt.

    Raises UserError when the template refuses the messages.
    """
    arguments = template_arguments(tokenizer, model)
    try:
        text = render_text(tokenizer, messages, arguments, tools, generation_prompt=True)
    except Refused as error:
        raise UserError(Problem("the chat template refuses these messages", str(error))) from error
    return encode(tokenizer, text)
