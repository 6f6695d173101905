"""No draft is measured on what it was trained on: prompts against the keys that an exported draft carries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.draft.format import PROVENANCE_FILE
from eagle3lab.evaluate.prompts import Prompt
from eagle3lab.store.files import sha256_of
from eagle3lab.store.trained_on import TRAINED_ON_FILE, TrainedOn, read_trained_on

NUM_NAMED = 5

Rendered = tuple[Prompt, list[int]]  # a prompt and the ids of its served prompt


@dataclass(frozen=True)
class Overlap:
    """What was held against the draft's training rows, and what came of it."""

    compared: tuple[str, ...]  # of "served prompt" and "user text"; empty: nothing could be
    note: str | None  # what the user should know
    trained_on: tuple[str, ...]  # ids of the prompts that were left out

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Ids by reason, where there are any."""
        return {"trained_on": list(self.trained_on)} if self.trained_on else {}


def check_overlap(
    draft: Path, rendered: Sequence[Rendered], prompts: PromptsConfig
) -> tuple[list[Rendered], Overlap]:
    """The prompts that the draft was not trained on, which are all of them unless some are to be left out.

    A prompt was trained on if a training row begins with its served prompt, or if a user says its text
    anywhere in a conversation of the training split, whatever template, system message, case and white space.
    A text inside a longer one is not found. Validation rows do not count.

    Raises:
        UserError: some prompts were, and `prompts.leave_out_trained_on` is not set; or all of them were.
        IntegrityError: the draft's keys are damaged.
    """
    keys = _keys_of(draft)
    if keys is None:
        return list(rendered), Overlap((), _unchecked(draft), ())
    seen = [
        prompt.prompt_id
        for prompt, ids in rendered
        if keys.has_prompt(ids) or keys.has_user_turn(str(prompt.messages[-1]["content"]))
    ]
    if seen and (len(seen) == len(rendered) or not prompts.leave_out_trained_on):
        raise UserError(_refusal(draft, seen, len(rendered), prompts.name))
    known = set(seen)
    kept = [(prompt, ids) for prompt, ids in rendered if prompt.prompt_id not in known]
    compared = ("served prompt", "user text") if keys.user_turns is not None else ("served prompt",)
    notes = []
    if seen:
        notes.append(f"{len(seen)} of {len(rendered)} prompts are left out: the draft was trained on them")
    if keys.user_turns is None:
        notes.append(
            "prompts could be held against the draft's training rows by their token ids alone: its store was "
            "imported, and the texts behind the rows are not known"
        )
    return kept, Overlap(compared, f"NOTE: {'; '.join(notes)}" if notes else None, tuple(seen))


def _keys_of(draft: Path) -> TrainedOn | None:
    file = draft / TRAINED_ON_FILE
    if not file.is_file():
        return None
    recorded = _provenance(draft).get(TRAINED_ON_FILE)
    if recorded is not None and recorded["sha256"] != sha256_of(file):
        expected = f"sha256 {recorded['sha256']} as in {PROVENANCE_FILE}"
        raise IntegrityError(Problem(f"{file} is damaged", sha256_of(file), expected))
    return read_trained_on(file)


def _provenance(draft: Path) -> dict[str, Any]:
    file = draft / PROVENANCE_FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _unchecked(draft: Path) -> str:
    if TRAINED_ON_FILE in _provenance(draft):
        why = "it was exported with the draft and is gone"
    else:
        why = "the draft was made elsewhere, or trained on a store without it"
    return (
        "NOTE: whether the draft was trained on these prompts could not be checked: there is no "
        f"{TRAINED_ON_FILE} in {draft} ({why})"
    )


def _refusal(draft: Path, seen: Sequence[str], num_prompts: int, name: str) -> Problem:
    named = ", ".join(seen[:NUM_NAMED]) + (", ..." if len(seen) > NUM_NAMED else "")
    other = "prompts=ANOTHER, or a draft that is trained without these conversations"
    leave_out = f"prompts.leave_out_trained_on=true leaves them out and counts them; else {other}"
    return Problem(
        f"the draft in {draft} was trained on {len(seen)} of the {num_prompts} prompts of {name}",
        named,
        "prompts that it has never seen",
        other if len(seen) == num_prompts else leave_out,
    )
