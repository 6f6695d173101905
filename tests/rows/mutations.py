"""Deterministic damage to conversations, files, templates and tokenizers: what people's data really looks like."""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN = (Path(__file__).parent.parent / "cases" / "_shared" / "templates" / "plain.jinja").read_text()
TOOLS = PLAIN.replace("m.content", "m.content + (m.tool_calls | tojson if m.tool_calls else '')")
PROMPT = "{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}"
TURN = "{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' -}}"


def user(text: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **keys}


def answer(text: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"when": "noon"}}}
GOOD = {"id": "good", "messages": [user("fine"), answer("yes")]}
BASES: list[dict[str, Any]] = [
    {"id": "plain", "messages": [user("what is it"), answer("a short answer")]},
    {"id": "long", "messages": [{"role": "system", "content": "be brief"}, user("one"), answer("first"),
                                user("two"), answer("second"), user("three"), answer("third")]},
    {"id": "sharegpt", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"},
                                         {"from": "human", "value": "again"}, {"from": "gpt", "value": "yes"}]},
    {"id": "tools", "tools": [{"name": "f"}],
     "messages": [user("call it"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "3"}, answer("three")]},
    {"id": "thinks", "messages": [user("think"), answer("done", reasoning_content="hmm"), user("ok"), answer("bye")]},
]  # fmt: skip


@dataclass
class Mutation:
    """One input: the bytes of a data file, and the template, tokenizer and options it is read with."""

    name: str
    data: bytes
    suffix: str = ".jsonl"
    template: str = TOOLS
    tokenizer: str | Path = "tok_bytes"
    options: dict[str, Any] = field(default_factory=dict)


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode(
        "utf-8", "surrogatepass"
    )


def all_mutations(folder: Path, shared: Path, other_verifiers: Path) -> Iterator[Mutation]:
    """Every mutation; damaged tokenizers are made in `folder`."""
    draw = random.Random(20)
    yield from _records(draw)
    yield from _files(draw)
    yield from _templates()
    yield from _tokenizers(draw, folder, shared, other_verifiers)


def _turns(record: dict[str, Any]) -> list[Any]:
    turns = record.get("messages", record.get("conversations"))
    assert isinstance(turns, list)
    return turns


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below `value`."""
    found: list[tuple[Any, Any]] = []
    pairs = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, child in pairs:
        found += [(value, key), *_nodes(child)]
    return found


WRONG = [None, 3, True, [], {}, "x", [1], 1.5, "", [None], {"text": "t"}, [{"type": "text", "text": "part"}]]
ROLES = [
    "developer",
    "gpt-4",
    "",
    "ASSISTANT",
    " user",
    None,
    7,
    "function",
    "ipython",
    "system",
    "tool",
    "assistant",
]
ODD = ["\u2028", "\u2029", "\x85", "\ufeff", "\x00", "\x0b", "\u202e", "e\u0301", "\U0001f468\u200d\U0001f469", "\ud800",
       "<|end|>", "<|end|>\n<|turn|>user\nno", "<|bos|>", "<|turn|>assistant\n", "</think>", "{{ messages }}", "\r\n", " \n\t"]  # fmt: skip


def _wrong_type(record: dict[str, Any], draw: random.Random) -> None:
    container, key = draw.choice(_nodes(record))
    container[key] = draw.choice(WRONG)


def _null(record: dict[str, Any], draw: random.Random) -> None:
    turn = draw.choice(_turns(record))
    turn["content" if "content" in turn else "value"] = None


def _role(record: dict[str, Any], draw: random.Random) -> None:
    turn = draw.choice(_turns(record))
    turn["role" if "role" in turn else "from"] = draw.choice(ROLES)


def _shuffle(record: dict[str, Any], draw: random.Random) -> None:
    draw.shuffle(_turns(record))


def _repeat(record: dict[str, Any], draw: random.Random) -> None:
    turns = _turns(record)
    turns.insert(draw.randrange(len(turns) + 1), copy.deepcopy(draw.choice(turns)))


def _without_key(record: dict[str, Any], draw: random.Random) -> None:
    container, key = draw.choice(_nodes(record))
    del container[key]


def _odd_text(record: dict[str, Any], draw: random.Random) -> None:
    turn = draw.choice(_turns(record))
    key = "content" if "content" in turn else "value"
    text = turn[key] or ""
    at = draw.randrange(len(text) + 1)
    turn[key] = text[:at] + draw.choice(ODD) + text[at:]


def _other_format(record: dict[str, Any], draw: random.Random) -> None:
    """Keys of the two formats mixed in one record."""
    for turn in _turns(record):
        if draw.random() < 0.5 and "role" in turn:
            turn["from"], turn["value"] = turn.pop("role"), turn.pop("content")


DAMAGE: list[tuple[Callable[[dict[str, Any], random.Random], None], int]] = [
    (_wrong_type, 30), (_null, 10), (_role, 20), (_shuffle, 12), (_repeat, 12), (_without_key, 16), (_odd_text, 30),
    (_other_format, 6),
]  # fmt: skip


def _records(draw: random.Random) -> Iterator[Mutation]:
    for damage, count in DAMAGE:
        for number in range(count):
            record = copy.deepcopy(draw.choice(BASES))
            damage(record, draw)
            yield Mutation(f"{damage.__name__[1:]}-{number}", lines(GOOD, record))


def _files(draw: random.Random) -> Iterator[Mutation]:
    for number, base in enumerate(BASES):
        line = lines(base)
        cut = line[: draw.randrange(1, len(line) - 1)]
        yield Mutation(f"cut_line-{number}", lines(GOOD) + cut)
        yield Mutation(f"cut_line_skipped-{number}", lines(GOOD) + cut, options={"skip_malformed": True})
        at = draw.randrange(len(line) - 1)
        flipped = line[:at] + bytes([line[at] ^ 0x80]) + line[at + 1 :]
        yield Mutation(f"flipped_bit-{number}", lines(GOOD) + flipped)
    whole = lines(GOOD, *BASES)
    yield Mutation("bom", b"\xef\xbb\xbf" + whole)
    yield Mutation("bom_in_the_middle", lines(GOOD) + b"\xef\xbb\xbf" + lines(BASES[0]))
    yield Mutation("crlf_and_blank_lines", whole.replace(b"\n", b"\r\n\r\n"))
    yield Mutation("no_last_newline", whole[:-1])
    yield Mutation("utf16", whole.decode().encode("utf-16"))
    yield Mutation(
        "latin1", lines(GOOD) + '{"messages": [{"role": "user", "content": "\u00e9"}]}\n'.encode("latin-1")
    )
    yield Mutation("array", json.dumps([GOOD, *BASES]).encode(), suffix=".json")
    yield Mutation("cut_array", json.dumps([GOOD, *BASES]).encode()[:-20], suffix=".json")
    yield Mutation("scalars", b'1\n"text"\nnull\n' + lines(GOOD))
    yield Mutation("empty", b"")
    yield Mutation("cut_gzip", gzip.compress(whole, mtime=0)[:-12], suffix=".jsonl.gz")
    yield Mutation("no_gzip", whole, suffix=".jsonl.gz")
    yield Mutation("twice_the_record", lines(GOOD, BASES[0], {**BASES[0], "id": "copy"}))
    yield Mutation("twice_dropped", lines(GOOD, BASES[0], BASES[0]), options={"drop_duplicates": True})
    doubled = b'{"messages": [{"role": "user", "content": "q"}, {"role": "user", "role": "assistant", "content": "a"}]}\n'
    yield Mutation("twice_the_key", lines(GOOD) + doubled)
    yield Mutation("not_a_number", lines(GOOD, {"messages": [user("q"), answer("a", weight=float("nan"))]}))
    yield Mutation("nested", lines(GOOD) + b"[" * 100_000 + b"]" * 100_000 + b"\n")
    deep = b'{"messages": [{"role": "user", "content": "q", "x": ' + b"[" * 300 + b"]" * 300 + b"}]}\n"
    yield Mutation("nested_less", lines(GOOD) + deep)
    yield Mutation("huge_number", lines(GOOD) + b'{"messages": ' + b"9" * 5000 + b"}\n")
    yield Mutation("too_long", lines(GOOD, {"messages": [user("u" * 600), answer("v")]}))
    yield Mutation("too_long_cut", lines(GOOD, BASES[1]), options={"max_len": 60, "too_long": "truncate"})
    yield Mutation("limit", whole, options={"max_tokens": 30})
    yield Mutation("strict", lines(GOOD, {"messages": [user("q")]}), options={"strict": True})


TEMPLATES = {
    "raises": "{{ raise_exception('no') }}",
    "raises_for_some": "{%- if messages | length > 2 -%}{{ raise_exception('too many') }}{%- endif -%}" + PLAIN,
    "empty": "",
    "white_space": " \n ",
    "two_bos": "{{- bos_token + bos_token -}}" + PLAIN,
    "one_bos": "{{- bos_token -}}" + PLAIN,
    "syntax_error": "{% for m in messages %}",
    "unknown_function": "{{ now() }}" + PLAIN,
    "unknown_filter": "{{ messages | no_such_filter }}",
    "divides_by_zero": "{{ 1 // 0 }}",
    "calls_itself": "{%- macro f(n) -%}{{ f(n + 1) }}{%- endmacro -%}{{ f(0) }}",
    "huge_range": "{%- for i in range(10000000000) -%}x{%- endfor -%}",
    "wants_a_key": "{%- for m in messages -%}{{ m.nobody.has_this }}{%- endfor -%}",
    "no_generation_prompt": "{%- for m in messages -%}" + TURN + "{%- endfor -%}",
    "other_generation_prompt": PLAIN.replace("'<|turn|>assistant\\n' -}}", "'<|turn|>model\\n' -}}"),
    "counts_messages": "{{- messages | length ~ '\\n' -}}" + PLAIN,
    "no_end_token": PLAIN.replace("<|end|>", ""),
    "drops_answers": "{%- for m in messages if m.role != 'assistant' -%}" + TURN + "{%- endfor -%}" + PROMPT,
    "drops_users": "{%- for m in messages if m.role == 'assistant' -%}" + TURN + "{%- endfor -%}" + PROMPT,
    "only_answers": "{%- for m in messages if m.role == 'assistant' -%}{{- m.content + '<|end|>' -}}{%- endfor -%}",
    "last_two_only": "{%- for m in messages[-2:] -%}" + TURN + "{%- endfor -%}" + PROMPT,
    "backwards": "{%- for m in messages | reverse -%}" + TURN + "{%- endfor -%}" + PROMPT,
    "random": PLAIN.replace("m.content", "m.content + (range(99999) | random | string if m.role == 'assistant' else '')"),
    "random_prompt": "{{- range(99999) | random -}}" + PLAIN,
    "text_after_the_end": PLAIN.replace("<|end|>\\n", "<|end|>\\nbye\\n"),
    "a_list": "{{ messages }}",
}  # fmt: skip


def _templates() -> Iterator[Mutation]:
    for name, template in TEMPLATES.items():
        yield Mutation(f"template_{name}", lines(GOOD, *BASES), template=template)


def _tokenizers(draw: random.Random, folder: Path, shared: Path, other_verifiers: Path) -> Iterator[Mutation]:
    data = lines(GOOD, *BASES)
    for name in ("tok_merge", "tok_bos", "tok_slow"):
        yield Mutation(f"tokenizer_{name}", data, tokenizer=name)
    yield Mutation("tokenizer_of_another_verifier", data, tokenizer=other_verifiers)
    yield Mutation("tokenizer_missing", data, tokenizer=folder / "nowhere")
    source = shared / "tok_bytes"
    damaged: list[tuple[str, str, Callable[[str], str | None]]] = [
        ("cut_tokenizer_json", "tokenizer.json", lambda text: text[: len(text) // 2]),
        ("empty_tokenizer_json", "tokenizer.json", lambda text: ""),
        ("json_of_something_else", "tokenizer.json", lambda text: "{}"),
        ("no_tokenizer_json", "tokenizer.json", lambda text: None),
        ("cut_config", "tokenizer_config.json", lambda text: text[: len(text) // 2]),
        ("no_config", "tokenizer_config.json", lambda text: None),
        ("no_end_token", "tokenizer_config.json", lambda text: text.replace('"eos_token": "<|end|>",', "")),
        ("other_end_token", "tokenizer_config.json", lambda text: text.replace("<|end|>", "<|tool|>")),
        ("end_token_nobody_has", "tokenizer_config.json", lambda text: text.replace("<|end|>", "<|nobody|>")),
        ("list_as_config", "tokenizer_config.json", lambda text: "[]"),
    ]
    for name, file, change in damaged:
        target = folder / name
        shutil.copytree(source, target)
        text = change((target / file).read_text())
        if text is None:
            (target / file).unlink()
        else:
            (target / file).write_text(text)
        yield Mutation(f"tokenizer_{name}", data, tokenizer=target)
    for number in range(6):  # another id for every byte: a tokenizer of the same size that means other texts
        target = folder / f"permuted{number}"
        shutil.copytree(source, target)
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        ids = list(vocabulary.values())
        draw.shuffle(ids)
        tokenizer["model"]["vocab"] = dict(zip(vocabulary, ids, strict=True))
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        yield Mutation(f"tokenizer_permuted-{number}", data, tokenizer=target)
