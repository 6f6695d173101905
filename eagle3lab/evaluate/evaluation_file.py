"""Reads what `evaluate.py` wrote, as far as a comparison needs it. No torch: it must start at once.

A new version of the format is one more reader in `READERS`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, IntegrityError, Problem, UserError
from eagle3lab.evaluate.acceptance import AcceptanceCounts

FILE = "evaluation.json"
FORMAT = "eagle3lab-evaluation"
CONFIGURATION, WEIGHTS = "configuration of the verifier", "weights of the verifier"
DRAFT = "trained"  # the draft that was given, beside its untrained copy


@dataclass(frozen=True, order=True)
class Setting:
    """One way of decoding one set of prompts."""

    prompts: str
    k: int
    temperature: float
    backend: str

    def __str__(self) -> str:
        return f"{self.prompts}, k={self.k}, T={self.temperature:g}, {self.backend}"


@dataclass(frozen=True)
class PromptCounts:
    """One decoded prompt."""

    category: str
    num_prompt_tokens: int
    prompt_sha256: str | None  # of the served ids; None: not recorded
    counts: AcceptanceCounts
    own_text: tuple[int, ...] | None  # the verifier's own greedy tokens


@dataclass(frozen=True)
class Measurement:
    """One draft decoded in one setting. `conditions`: what else must be the same to compare it."""

    source: Path
    draft: str
    verifier: str  # its name; what it is stands in `conditions`
    setting: Setting
    conditions: Mapping[str, Any]  # None: not recorded
    prompts: Mapping[str, PromptCounts]  # by prompt id, in the order of the file


def evaluations_of(place: Path) -> list[Measurement]:
    """Everything measured of what a user named: a run, draft or evaluation directory, or an evaluation file.

    Raises:
        UserError: nothing was measured.
        IntegrityError: a file is not what it says.
    """
    found = [m for file in find_evaluations(place) for m in read_evaluation(file)]
    if _is_draft(place):  # other drafts may lie beside it
        found = [m for m in found if Path(m.draft).name == place.name]
    if not found:
        raise _nothing_evaluated(place)
    return found


def find_evaluations(place: Path) -> list[Path]:
    """The evaluation files that a run, draft or evaluation directory, or such a file itself, stands for.

    Raises:
        UserError: there is none.
    """
    if place.is_file():
        return [place]
    if (place / FILE).is_file():
        return [place / FILE]
    # evaluate.py writes beside the draft: into the run directory
    for directory in (place, place.parent) if _is_draft(place) else (place,):
        if found := sorted(directory.glob(f"evaluation*/{FILE}")):
            return found
    raise _nothing_evaluated(place)


def _is_draft(place: Path) -> bool:
    return (place / "model.safetensors").is_file()


def _nothing_evaluated(place: Path) -> UserError:
    expected = f"a run, draft or evaluation directory, or an {FILE}"
    if not place.exists():
        return UserError(Problem("no such directory", str(place), expected))
    draft = place / "draft" if (place / "draft").is_dir() else place
    fix = shlex.join(["python", "evaluate.py", f"draft={draft}"])
    return UserError(Problem("nothing was evaluated there", str(place), expected, fix))


def read_evaluation(path: Path) -> list[Measurement]:
    """Every setting that one file holds.

    Raises:
        IntegrityError: no evaluation, one of a newer eagle3lab, or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"] == FORMAT and content["format_version"]
    except (OSError, *DAMAGED_JSON) as error:
        raise IntegrityError(
            Problem(f"{path} is no evaluation", f"{type(error).__name__}: {error}", f"a file {FILE}")
        ) from error
    if found not in READERS:
        expected = f"{FORMAT}, version {' or '.join(map(str, READERS))}"
        raise IntegrityError(
            Problem(
                f"{path} is of another format", f"{content['format']}, {content['format_version']}", expected
            )
        )
    try:
        measurements = READERS[found](path, content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(Problem(f"{path} is damaged", f"{type(error).__name__}: {error}")) from error
    if not measurements:
        raise IntegrityError(Problem(f"{path} holds no decoded draft"))
    return measurements


def _read_v1(path: Path, content: Mapping[str, Any]) -> list[Measurement]:
    """One greedy setting per k."""
    temperature = float(content["setup"]["temperature"])
    return _measurements(path, content, [(v, temperature, {"k": v["k"]}) for v in content["variants"]])


def _read_v2(path: Path, content: Mapping[str, Any]) -> list[Measurement]:
    """Every k with every temperature; acceptance is that of the first batch size."""
    first = content["setup"]["batch_sizes"][0]
    return _measurements(
        path,
        content,
        [
            (v, v["temperature"], {"k": v["k"], "temperature": v["temperature"], "batch_size": first})
            for v in content["variants"]
        ],
    )


def _measurements(
    path: Path,
    content: Mapping[str, Any],
    found: Iterable[tuple[Mapping[str, Any], float, Mapping[str, Any]]],
) -> list[Measurement]:
    """From `(variant, temperature, what its trials have)` of every draft, k and temperature."""
    setup = content["setup"]
    measurements = []
    for variant, temperature, trial_has in found:
        if variant["variant"] != DRAFT:
            continue
        k = variant["k"]
        setting = Setting(setup["prompts"]["name"], k, float(temperature), setup["backend"])
        has = {"variant": DRAFT, **trial_has}
        prompts = _by_id((p["id"], _prompt(p, k, has)) for p in content["prompts"])
        steps, said = sum(p.counts.drafts for p in prompts.values()), variant["overall"]["drafts"]
        if steps != said:
            raise ValueError(f"{steps} verification steps in the prompts, {said} in the summary")
        conditions = _conditions(setup, setting)
        measurements.append(
            Measurement(path, setup["draft"], setup["verifier"]["name"], setting, conditions, prompts)
        )
    return measurements


def _prompt(prompt: Mapping[str, Any], k: int, trial_has: Mapping[str, Any]) -> PromptCounts:
    trials = [t for t in prompt["trials"] if all(t[key] == value for key, value in trial_has.items())]
    if len(trials) != 1:
        raise ValueError(f"{len(trials)} trials of prompt {prompt['id']} with {dict(trial_has)}")
    plain = prompt["plain"]
    return PromptCounts(
        category=prompt["category"],
        num_prompt_tokens=prompt["num_prompt_tokens"],
        prompt_sha256=prompt.get("prompt_sha256"),
        counts=AcceptanceCounts.from_steps(trials[0]["accepted_per_step"], k),
        own_text=None if plain.get("temperature") else tuple(plain["tokens"]),
    )


def _conditions(setup: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    verifier = setup["verifier"]
    return {
        CONFIGURATION: verifier["config_hash"],
        WEIGHTS: verifier.get("weight_fingerprint"),
        "template arguments": setup["template_args"],
        "max_new_tokens": setup["max_new_tokens"],
        "precision": setup["precision"],
        "batch size of acceptance": setup.get("batch_sizes", [1])[0],
        "proposal of drafted tokens": setup.get("proposal") if setting.temperature else None,
    }


def _by_id(prompts: Iterable[tuple[str, PromptCounts]]) -> dict[str, PromptCounts]:
    """Prompts by id; one whose id was there before gets its number behind it."""
    found: dict[str, PromptCounts] = {}
    for prompt_id, prompt in prompts:
        number = 1
        name = prompt_id
        while name in found:
            number += 1
            name = f"{prompt_id} ({number})"
        found[name] = prompt
    return found


READERS: dict[int, Callable[[Path, Mapping[str, Any]], list[Measurement]]] = {1: _read_v1, 2: _read_v2}
