"""What an evaluation found: per prompt, per variant, and as one JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3lab.evaluate.acceptance import AcceptanceCounts, AcceptanceStats, summarise
from eagle3lab.evaluate.decoder import Decoded, Difference
from eagle3lab.evaluate.evaluation_file import FILE, FORMAT
from eagle3lab.evaluate.prompts import Prompt
from eagle3lab.store.files import write_text

FORMAT_VERSION = 2
CONVENTIONS = {
    "acceptance_length": "tokens per verification step, with bonus: 1 + accepted / drafts; at the first batch size",
    "conditional_acceptance": "P(position j accepted | positions before it accepted)",
    "unconditional_acceptance": "P(positions 0..j accepted)",
    "draft_acceptance_rate": "accepted / drafted tokens",
    "steps": "a step counts in full, even if the end token or the budget cut its text (as in vLLM)",
    "interval": "95 % percentile bootstrap over prompts",
    "identical": "texts equal to the verifier's own token by token, same engine, same batch size; greedy alone",
    "near_tie": "the first difference is between two tokens that rounding may put in either order",
    "simulated_acceptance_length": "teacher-forced proxy of training over validation rows, ttt_steps deep",
    "coverage": "share of the verifier's own tokens here that are in the draft vocabulary: others are never right",
}


@dataclass(frozen=True)
class Task:
    """One prompt as it is decoded."""

    prompt: Prompt
    ids: tuple[int, ...]  # as served
    budget: int  # new tokens, at most

    @property
    def sha256(self) -> str:
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Way:
    """How a text is decoded. The verifier alone is the variant "" with k = 0."""

    variant: str  # "", "trained" or "untrained"
    k: int
    temperature: float
    batch_size: int

    @property
    def alone(self) -> Way:
        """The same without a draft."""
        return Way("", 0, self.temperature, self.batch_size)


@dataclass(frozen=True)
class Pass:
    """Every prompt decoded one way: a text per prompt, and the tokens and seconds that speed is made of."""

    way: Way
    texts: tuple[Decoded, ...]
    num_tokens: int
    seconds: float
    differences: tuple[Difference | None, ...] = ()  # of greedy texts from the verifier's own

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds and self.num_tokens else None

    @property
    def counts(self) -> list[AcceptanceCounts]:
        return [AcceptanceCounts.from_steps(text.accepted, self.way.k) for text in self.texts]


@dataclass(frozen=True)
class Speed:
    """Tokens per second with a draft and without one, the same engine, the same run."""

    batch_size: int
    plain_tokens_per_second: float | None
    draft_tokens_per_second: float | None
    speed_ratio: float | None
    acceptance_length: float | None  # of this very pass
    num_identical: int | None
    num_near_ties: int | None


@dataclass(frozen=True)
class VariantResult:
    """One draft with one k at one temperature over all prompts."""

    variant: str
    k: int
    temperature: float
    overall: AcceptanceStats
    per_category: dict[str, AcceptanceStats]
    num_identical: int | None  # prompts whose text is the verifier's own, token by token; None: sampled
    num_near_ties: int | None  # of the others, those that rounding explains
    plain_tokens_per_second: float | None
    draft_tokens_per_second: float | None
    speed_ratio: float | None  # wall time per emitted token, plain over drafted
    speeds: tuple[Speed, ...] = field(default=())  # by batch size; the three above are of the first


@dataclass(frozen=True)
class Evaluation:
    """A whole run. `setup` says what was decoded with what."""

    setup: dict[str, Any]
    variants: tuple[VariantResult, ...]
    tasks: tuple[Task, ...]
    passes: tuple[Pass, ...]
    texts: tuple[str, ...]  # the verifier's own, of its first pass

    def variant(
        self, name: str = "trained", k: int | None = None, temperature: float | None = None
    ) -> VariantResult:
        """The result of one variant; without `k` or `temperature` the first one measured."""
        return next(
            v
            for v in self.variants
            if v.variant == name and k in (None, v.k) and temperature in (None, v.temperature)
        )

    @property
    def plain(self) -> Pass:
        """The verifier alone, as it was decoded first."""
        return next(p for p in self.passes if p.way.k == 0)

    @property
    def unexplained(self) -> list[tuple[str, Way, Difference]]:
        """Prompt ids, ways and first differences of texts that rounding alone does not explain."""
        return [
            (task.prompt.prompt_id, found.way, difference)
            for found in self.passes
            for task, difference in zip(self.tasks, found.differences, strict=False)
            if difference is not None and not difference.near_tie
        ]

    def write(self, directory: Path) -> Path:
        """`directory/evaluation.json`, at once or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "conventions": CONVENTIONS,
            "setup": self.setup,
            "variants": [asdict(v) for v in self.variants],
            "prompts": [self._prompt(i) for i in range(len(self.tasks))],
        }
        write_text(directory / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return directory / FILE

    def _prompt(self, i: int) -> dict[str, Any]:
        task, plain = self.tasks[i], self.plain
        return {
            "id": task.prompt.prompt_id,
            "category": task.prompt.category,
            "num_turns_left_out": task.prompt.num_turns_left_out,
            "num_prompt_tokens": len(task.ids),
            "prompt_sha256": task.sha256,
            "plain": {
                "temperature": plain.way.temperature,
                "tokens": list(plain.texts[i].tokens),
                "seconds": plain.texts[i].seconds,
                "text": self.texts[i],
            },
            "trials": [_trial(p, i) for p in self.passes if p.way.k],
        }


def _trial(found: Pass, i: int) -> dict[str, Any]:
    text, greedy = found.texts[i], found.way.temperature == 0
    difference = found.differences[i] if greedy else None
    return {
        **asdict(found.way),
        "accepted_per_step": list(text.accepted),
        "num_new_tokens": len(text.tokens),
        "num_cut_tokens": text.num_cut,
        "seconds": text.seconds,
        "identical": difference is None if greedy else None,
        "difference": asdict(difference) if difference else None,
    }


def summarise_passes(
    tasks: Sequence[Task], passes: Sequence[Pass], *, seed: int
) -> tuple[VariantResult, ...]:
    """One result per draft, k and temperature; acceptance is that of the first batch size."""
    plain = {p.way: p for p in passes if p.way.k == 0}
    drafted: dict[tuple[str, int, float], list[Pass]] = {}
    for p in passes:
        if p.way.k:
            drafted.setdefault((p.way.variant, p.way.k, p.way.temperature), []).append(p)
    names = list(dict.fromkeys(variant for variant, _, _ in drafted))
    ordered = sorted(drafted, key=lambda key: (names.index(key[0]), key[2], key[1]))
    return tuple(_summarise(tasks, drafted[key], plain, seed) for key in ordered)


def _summarise(
    tasks: Sequence[Task], passes: Sequence[Pass], plain: dict[Way, Pass], seed: int
) -> VariantResult:
    first = passes[0]
    by_category: dict[str, list[AcceptanceCounts]] = {}
    for task, counts in zip(tasks, first.counts, strict=True):
        by_category.setdefault(task.prompt.category, []).append(counts)
    speeds = tuple(_speed(p, plain[p.way.alone]) for p in passes)
    return VariantResult(
        variant=first.way.variant,
        k=first.way.k,
        temperature=first.way.temperature,
        overall=summarise(first.counts, seed=seed),
        per_category={name: summarise(counts, seed=seed) for name, counts in sorted(by_category.items())},
        num_identical=speeds[0].num_identical,
        num_near_ties=speeds[0].num_near_ties,
        plain_tokens_per_second=speeds[0].plain_tokens_per_second,
        draft_tokens_per_second=speeds[0].draft_tokens_per_second,
        speed_ratio=speeds[0].speed_ratio,
        speeds=speeds,
    )


def _speed(drafted: Pass, plain: Pass) -> Speed:
    slow, fast = plain.tokens_per_second, drafted.tokens_per_second
    greedy = drafted.way.temperature == 0
    total = sum(drafted.counts[1:], drafted.counts[0])
    differences = [d for d in drafted.differences if d is not None]
    return Speed(
        batch_size=drafted.way.batch_size,
        plain_tokens_per_second=slow,
        draft_tokens_per_second=fast,
        speed_ratio=fast / slow if slow and fast else None,
        acceptance_length=1 + total.accepted / total.drafts if total.drafts else None,
        num_identical=len(drafted.texts) - len(differences) if greedy else None,
        num_near_ties=sum(d.near_tie for d in differences) if greedy else None,
    )
