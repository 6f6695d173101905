"""Served prompt + completion, against references that share no code with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.rows.render import decode, render_prompt, template_arguments
from eagle3lab.rows.tokenizer import load_tokenizer, special_tokens
from eagle3lab.rows.turns import RawRow, Rules, Turns, build_turns

SPECIALS = [
    "<|bos|>",
    "<|turn|>",
    "<|end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|tool|>",
]
END = 258


def byte_ids(text: str) -> list[int]:
    """What the byte tokenizer must give: a reference of its own."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
    return [
        i for p in pieces for i in ([256 + SPECIALS.index(p)] if p in SPECIALS else list(p.encode("utf-8")))
    ]


def turns_of(tokenizer: Any, messages: Sequence[dict[str, Any]], model: ModelConfig | None = None) -> Turns:
    arguments = template_arguments(tokenizer, model or ModelConfig(name="m"))
    rules = Rules(arguments, frozenset({tokenizer.eos_token_id}), special_tokens(tokenizer))
    return build_turns(tokenizer, messages, None, rules)


def mask_of(row: RawRow) -> list[int]:
    mask = [0] * len(row.input_ids)
    for start, stop in row.spans:
        mask[start:stop] = [1] * (stop - start)
    return mask


def with_template(tokenizer: Any, template: str) -> Any:
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    copy.chat_template = template
    return copy


def chat_messages(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
hostile = st.lists(st.one_of(texts, st.sampled_from([*SPECIALS, "\n", "assistant\n"])), max_size=6).map(
    "".join
)
answers = texts.filter(lambda text: text.strip() and not any(s in text for s in SPECIALS))


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(hostile)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(hostile)})
        answer = {"role": "assistant", "content": draw(answers)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(answers)
        messages.append(answer)
        if draw(st.booleans()):
            messages.append({"role": "tool", "content": draw(hostile)})
    return messages


@settings(max_examples=150, deadline=None)
@given(messages=conversations())
def test_the_supervised_text_is_every_answer_with_its_end_token(
    messages: list[dict[str, Any]], byte_tokenizer: Any
) -> None:
    result = turns_of(byte_tokenizer, messages)
    (row,) = result.rows
    assert not result.dropped
    stretches = groupby(zip(row.input_ids, mask_of(row), strict=True), key=lambda pair: pair[1])
    supervised = [[token for token, _ in group] for one, group in stretches if one]
    wanted = [m["content"] for m in messages if m["role"] == "assistant"]
    assert [decode(byte_tokenizer, ids) for ids in supervised] == [text + "<|end|>" for text in wanted]
    rendered = "".join(f"<|turn|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
    assert byte_ids(rendered)[: len(row.input_ids)] == row.input_ids


@settings(max_examples=100, deadline=None)
@given(messages=conversations(), template=st.sampled_from(["plain.jinja", "think.jinja", "bos.jinja"]))
def test_rows_begin_with_served_prompts_and_supervise_every_turn_once(
    messages: list[dict[str, Any]], template: str, byte_tokenizer: Any, shared: Path
) -> None:
    source = (shared / "templates" / template).read_text()
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)

    def render(part: list[dict[str, Any]], generation: bool) -> str:
        return jinja.render(messages=part, add_generation_prompt=generation, bos_token="<|bos|>")

    wanted = []
    for t, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, full = render(messages[:t], True), render(messages[: t + 1], False)
            assert full.startswith(prompt)
            prompt_ids, completion = byte_ids(prompt), byte_ids(full[len(prompt) :])
            wanted.append((prompt_ids, completion[: completion.index(END) + 1]))

    result = turns_of(with_bos(byte_tokenizer, source), messages)
    found = [(r.input_ids[:start], r.input_ids[start:stop]) for r in result.rows for start, stop in r.spans]
    assert sorted(found) == sorted(wanted)
    assert all(sum(mask_of(r)) == sum(stop - start for start, stop in r.spans) for r in result.rows)


def with_bos(tokenizer: Any, template: str) -> Any:
    copy = with_template(tokenizer, template)
    copy.bos_token = "<|bos|>"
    return copy


def test_one_row_serves_all_turns_where_history_is_kept(byte_tokenizer: Any) -> None:
    result = turns_of(byte_tokenizer, chat_messages("a", "b", "c", "d", "e", "f"))
    assert [len(row.spans) for row in result.rows] == [3]
    assert not result.noted


def test_what_follows_the_last_answer_is_cut_and_counted(byte_tokenizer: Any) -> None:
    whole = turns_of(byte_tokenizer, chat_messages("a", "b", "more?"))
    assert whole.rows == turns_of(byte_tokenizer, chat_messages("a", "b")).rows
    assert whole.repaired == {"trailing_turns_cut": 1}


def test_an_opening_assistant_turn_stays_context(byte_tokenizer: Any) -> None:
    messages = [{"role": "assistant", "content": "hello"}, *chat_messages("a", "b")]
    result = turns_of(byte_tokenizer, messages)
    assert decode(byte_tokenizer, result.rows[0].input_ids).count("hello") == 1
    assert sum(mask_of(result.rows[0])) == len("b") + 1
    assert result.dropped == {"assistant_first": 1}


def test_an_end_token_inside_an_answer_ends_its_supervision(byte_tokenizer: Any) -> None:
    result = turns_of(byte_tokenizer, chat_messages("a", "yes<|end|>and more"))
    (row,) = result.rows
    assert (
        decode(byte_tokenizer, [t for t, m in zip(row.input_ids, mask_of(row), strict=True) if m])
        == "yes<|end|>"
    )
    assert result.noted["text_after_end_token"] == 1


def test_a_rendered_turn_that_does_not_continue_its_prompt_is_dropped(byte_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\nSure: {% endif %}"
    )
    result = turns_of(with_template(byte_tokenizer, template), chat_messages("a", "b"))
    assert result.rows == []
    assert result.dropped == {"boundary_unstable": 1}


def test_a_template_that_leaves_answers_out_gives_no_row(byte_tokenizer: Any) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    result = turns_of(with_template(byte_tokenizer, template), chat_messages("a", "b"))
    assert result.rows == []
    assert result.dropped == {"answer_not_rendered": 1}


def test_a_final_marker_that_history_replaces_gives_a_row_per_turn(byte_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|end|>{% else %}<|tool|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    result = turns_of(with_template(byte_tokenizer, template), chat_messages("a", "b", "c", "d"))
    assert [len(row.spans) for row in result.rows] == [1, 1]
    assert result.noted["history_rewriting"] == 1


def test_an_opened_reasoning_block_belongs_to_the_prompt(byte_tokenizer: Any, shared: Path) -> None:
    template = (shared / "templates" / "think_open.jinja").read_text()
    messages = chat_messages("q", "<think>\nwhy</think>a")
    (row,) = turns_of(with_template(byte_tokenizer, template), messages).rows
    supervised = [t for t, m in zip(row.input_ids, mask_of(row), strict=True) if m]
    assert decode(byte_tokenizer, supervised) == "why</think>a<|end|>"


def test_a_template_that_asks_for_today_is_told_a_fixed_date(byte_tokenizer: Any, shared: Path) -> None:
    tokenizer = with_template(byte_tokenizer, (shared / "templates" / "dated.jinja").read_text())
    model = ModelConfig(name="m", template_date="2031-05-17")
    prompt = render_prompt(tokenizer, chat_messages("q"), model)
    assert "Date: 2031-05-17" in decode(tokenizer, prompt)
    (row,) = turns_of(tokenizer, chat_messages("q", "a"), model).rows
    assert row.input_ids[: len(prompt)] == prompt
    with pytest.raises(UserError, match="template_date"):
        render_prompt(tokenizer, chat_messages("q"), ModelConfig(name="m", template_date="today"))


def test_generation_blocks_change_nothing(byte_tokenizer: Any, shared: Path) -> None:
    template = (shared / "templates" / "generation.jinja").read_text()
    messages = chat_messages("a", "b", "c", "d")
    assert turns_of(with_template(byte_tokenizer, template), messages).rows == (
        turns_of(byte_tokenizer, messages).rows
    )


def test_history_that_merges_differently_gives_the_earlier_turn_its_own_row(shared: Path) -> None:
    tokenizer = load_tokenizer(
        ModelConfig(name="m", tokenizer=str(shared / "tok_merge")), shared / "target_tiny"
    )
    result = turns_of(tokenizer, chat_messages("hi", "\nan", "more", "ok"))
    assert [len(row.spans) for row in result.rows] == [1, 1]
    assert result.noted["history_retokenized"] == 1
    # serving renders the whole history as one text, where the two newlines are one token
    assert 256 not in result.rows[0].input_ids
    assert 256 in result.rows[1].input_ids


def word_start_tokenizer() -> Any:
    """Like older sentencepiece models: a text begins with a space of its own, and ':o' is one token."""
    characters = sorted({*"\u2581:ABQko", "a"})
    vocabulary = {c: i for i, c in enumerate([*characters, ":o"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(":", "o")], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}A:{% else %}{{ m.content }}<e>"
        "{% endif %}{% endfor %}{# add_generation_prompt #}"
    )
    return fast


def test_a_completion_that_cannot_be_tokenized_apart_is_dropped() -> None:
    tokenizer = word_start_tokenizer()
    assert turns_of(tokenizer, chat_messages("k", "ok")).dropped == {"boundary_unstable": 1}
    (row,) = turns_of(tokenizer, chat_messages("k", "ko")).rows
    assert decode(tokenizer, row.input_ids[slice(*row.spans[0])]) == "ko<e>"


def test_a_broken_template_is_a_user_error(byte_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="not valid Jinja"):
        turns_of(with_template(byte_tokenizer, "{% for m in %}"), chat_messages("a", "b"))


@pytest.mark.parametrize("name", ["tokenize", "max_length"])
def test_template_arguments_may_not_be_the_renderers(name: str, byte_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=rf"template_args\.{name}"):
        template_arguments(byte_tokenizer, ModelConfig(name="m", template_args={name: True}))


def test_the_rendered_prompt_is_what_transformers_serves(
    byte_tokenizer: Any, chat: Callable[..., dict[str, Any]]
) -> None:
    messages = chat_messages("a", "b", "c")
    direct = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert render_prompt(byte_tokenizer, messages, ModelConfig(name="m")) == direct


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("<|bos|><|bos|>{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "two_bos"),
        ("{% if not add_generation_prompt %}{{ messages[-1].content }}<|end|>{% endif %}", "empty_prompt"),
        (
            "{% for m in messages %}{{ m.content }}"
            "{% if m.role == 'assistant' %}{{ range(99999) | random }}{% endif %}{% endfor %}",
            "template_not_deterministic",
        ),
        ("{{ 1 // 0 }}", "template_error"),
    ],
)
def test_a_template_that_serving_could_not_follow_is_a_counted_drop(
    template: str, reason: str, byte_tokenizer: Any
) -> None:
    tokenizer = with_template(byte_tokenizer, template)
    rules = Rules({}, frozenset({END}), special_tokens(byte_tokenizer), bos_token_id=256)
    result = build_turns(tokenizer, chat_messages("a", "b"), None, rules)
    assert result.rows == []
    assert result.dropped == {reason: 1}
    longer = build_turns(tokenizer, chat_messages("a", "b", "c", "d"), None, rules)
    assert longer.rows == []
    assert sum(longer.dropped.values()) == 2
