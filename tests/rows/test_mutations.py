"""Damaged input against the row builder: a right row, a counted drop, or a refusal, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DataConfig, ModelConfig, TooLong
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import Row, RowSet
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.locate import asset_path

END, BOS = 258, 256
SPELLED = {"human": "user", "gpt": "assistant"}


class Reference:
    """The served prompt and the completion of a turn, by jinja2 and the tokenizer alone (P1, P2)."""

    def __init__(self, mutation: Any, tokenizer: Any) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = self._raise
        self._template = environment.from_string(mutation.template)
        self._tokenizer = tokenizer

    def _raise(self, message: str) -> None:
        raise ValueError(message)

    def render(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool) -> str:
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=generation_prompt, bos_token="<|bos|>"
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def turn(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
        """(prompt ids, supervised ids) of the last message."""
        prompt_text = self.render(messages[:-1], tools, True)
        text = self.render(messages, tools, False)
        if not text.startswith(prompt_text):
            return [], []  # no row may hold it
        prompt, whole = self.encode(prompt_text), self.encode(text)
        added = (
            whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.encode(text[len(prompt_text) :])
        )
        ends = {END, self._tokenizer.eos_token_id}
        stop = next((i + 1 for i, token in enumerate(added) if token in ends), len(added))
        return prompt, added[:stop]


def messages_of(record: Any) -> list[dict[str, Any]]:
    """The record as a template should see it, written down a second time."""
    turns = record.get("messages") if record.get("messages") is not None else record["conversations"]
    messages = []
    for turn in turns:
        role = turn.get("role") if turn.get("role") is not None else turn["from"]
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if isinstance(content, list):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        rest = {
            k: v for k, v in turn.items() if v is not None and k not in ("role", "from", "content", "value")
        }
        messages.append({"role": SPELLED.get(role, role), "content": content or "", **rest})
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
    return messages


def records_of(mutation: Any) -> dict[int, Any]:
    """Line or position -> record, for what is a record at all."""
    data = mutation.data.removeprefix(b"\xef\xbb\xbf")
    if mutation.suffix == ".json":
        return dict(enumerate(json.loads(data), 1))
    records = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            records[number] = json.loads(line)
        except (ValueError, RecursionError):
            records[number] = None
    return records


def check_rows(mutation: Any, rowset: RowSet, max_len: int, tokenizer: Any) -> None:
    """P1 to P4 of every row and of the account, from the input file and not from the builder."""
    account = rowset.accounting
    assert account.read == account.kept + sum(account.dropped.values())
    assert account.rows == len(rowset.rows) >= account.kept
    records = records_of(mutation)
    non_blank = sum(1 for line in mutation.data.split(b"\n") if line.strip(b"\r\n\t "))
    assert account.read == (len(records) if mutation.suffix == ".json" else non_blank)
    reference = Reference(mutation, tokenizer)
    num_answers = num_supervised = 0
    for _, group in groupby(rowset.rows, key=lambda row: row.source):
        rows = list(group)
        record = records[int(rows[0].source.rpartition(":")[2])]
        messages = messages_of(record)
        tools = record.get("tools") or None
        turns = [t for t, m in enumerate(messages) if m["role"] == "assistant"]
        num_answers += len(turns)
        for row in rows:
            num_supervised += check_row(row, messages, tools, turns, reference, max_len)
    assert num_answers == num_supervised + sum(account.turns_dropped.values())


def check_row(
    row: Row, messages: list[dict[str, Any]], tools: Any, turns: list[int], reference: Reference, max_len: int
) -> int:
    """The ones are whole turns, each behind its own served prompt; returns their number."""
    ids, mask = list(row.input_ids), list(row.loss_mask)
    assert 0 < sum(mask) <= len(ids) == len(mask) <= max_len
    assert set(mask) <= {0, 1}
    if not any("<|bos|>" in m["content"] for m in messages):
        assert ids.count(BOS) <= 1 or reference._tokenizer.bos_token_id != BOS
    wanted = [reference.turn(messages[: t + 1], tools) for t in turns if _can_be_answered(messages, t)]
    spans = {
        len(prompt): min(len(prompt) + len(answer), len(ids))
        for prompt, answer in wanted
        if answer and (prompt + answer)[: len(ids)] == ids[: len(prompt) + len(answer)]
    }
    at = found = 0
    while at < len(ids):
        if mask[at]:
            assert at in spans, f"{row.source}: token {at} is supervised and begins no turn"
            assert set(mask[at : spans[at]]) == {1}, (
                f"{row.source}: the turn at {at} is not supervised in full"
            )
            at, found = spans[at], found + 1
        else:
            at += 1
    return found


def _can_be_answered(messages: list[dict[str, Any]], turn: int) -> bool:
    return any(m["role"] == "user" for m in messages[:turn])


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """mutations.py as a module."""
    spec = importlib.util.spec_from_file_location("row_mutations", Path(__file__).with_name("mutations.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["row_mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutations(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    shared = Path(__file__).parent.parent / "cases" / "_shared"
    return list(made.all_mutations(tmp_path_factory.mktemp("tokenizers"), shared, asset_path("tiny")))


def test_no_mutated_input_is_accepted_silently(
    mutations: list[Any], tmp_path: Path, shared: Path, facts: VerifierFacts, capsys: Any
) -> None:
    assert len({m.name for m in mutations}) == len(mutations) >= 200
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for mutation in mutations:
        file, template = tmp_path / f"data{mutation.suffix}", tmp_path / "template.jinja"
        file.write_bytes(mutation.data)
        template.write_text(mutation.template)
        tokenizer = (
            mutation.tokenizer if isinstance(mutation.tokenizer, Path) else shared / mutation.tokenizer
        )
        options = dict(mutation.options)
        options["too_long"] = TooLong(options.get("too_long", "drop"))
        data = DataConfig(name="mutated", paths=[str(file)], **options)
        model = ModelConfig(name="mutated", tokenizer=str(tokenizer), template=str(template))
        try:
            rowset = build_rows(data, model, facts)
        except UserError:
            verdicts["refused with a message"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{mutation.name} ends in {type(error).__name__}: {error}") from error
        try:
            check_rows(mutation, rowset, rowset.max_len, AutoTokenizer.from_pretrained(tokenizer))
        except Exception as error:
            raise AssertionError(f"{mutation.name}: {type(error).__name__}: {error}") from error
        account = rowset.accounting
        if mutation.tokenizer != "tok_bytes" and "tokenizer_" in mutation.name:
            assert account.noted.get("tokenizer_not_beside_the_weights") or _same_ids(mutation), mutation.name
        changed = {**account.dropped, **account.turns_dropped}
        reasons.update(changed)
        if changed:
            verdicts["dropped and counted"] += 1
        elif account.repaired or account.noted:
            verdicts["kept right, repaired or noted"] += 1
        else:
            verdicts["kept right"] += 1
    assert sum(verdicts.values()) == len(mutations)
    assert verdicts["kept right"] < len(mutations) / 3
    with capsys.disabled():
        print(
            f"\n{len(mutations)} mutated inputs: {dict(verdicts)}; drops by reason: {dict(sorted(reasons.items()))}"
        )


def _same_ids(mutation: Any) -> bool:
    """A damage that leaves every id as it was is no damage."""
    rebuilt = AutoTokenizer.from_pretrained(mutation.tokenizer)
    text = "<|turn|>user\nabc<|end|>\n"
    return list(rebuilt(text, add_special_tokens=False)["input_ids"])[:3] == [257, 117, 115]


def test_the_untouched_record_beside_them_is_kept_as_it_is(rows_of: Any, made: ModuleType) -> None:
    (row,) = rows_of(made.GOOD).rows
    assert bytes(t for t in row.input_ids if t < 256) == b"user\nfine\nassistant\nyes\n"
