"""Two or more variants over the same prompts: every setting, all prompts together and each category."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3lab.evaluate.acceptance import tally
from eagle3lab.evaluate.bootstrap import CONFIDENCE
from eagle3lab.evaluate.comparable import Aligned
from eagle3lab.evaluate.evaluation_file import Setting
from eagle3lab.evaluate.paired import RESAMPLES, Compared, compare_tallies, verdict

ALL = "all"  # the row that pools every category


@dataclass(frozen=True)
class Variant:
    """One recipe: a run, or several that differ in their seeds alone. The first variant is the baseline."""

    label: str  # A, B, ...
    members: tuple[str, ...]  # as the user named them
    seeds: tuple[str, ...]  # of each member; empty where none is known
    choices: str = ""  # what sets its configuration apart from the others'

    @property
    def num_runs(self) -> int:
        return len(self.members)

    @property
    def title(self) -> str:
        return f"{self.label} {self.choices}".rstrip()

    def describe(self) -> str:
        named = f"{self.label}: {self.choices}; " if self.choices else f"{self.label}: "
        if self.num_runs == 1:
            return named + self.members[0]
        runs = ", ".join(f"{member} ({seed})" for member, seed in zip(self.members, self.seeds, strict=True))
        return f"{named}{self.num_runs} runs that differ in seeds alone: {runs}"


@dataclass(frozen=True)
class Section:
    """One setting."""

    setting: Setting
    num_left_out: int
    scopes: Mapping[str, Compared]  # ALL, then every category where there is more than one


@dataclass(frozen=True)
class Comparison:
    """All of it, and what must be said with it."""

    variants: tuple[Variant, ...]
    sections: tuple[Section, ...]
    differing: Mapping[str, Sequence[Any]]  # nested key of the configurations -> its value in every variant
    notes: tuple[str, ...]
    method: tuple[str, ...]

    @property
    def order(self) -> list[int]:
        """The variants, best first."""
        return best_first(self.variants, self.sections)


def label(index: int) -> str:
    """A, B, ..., Z, then V27, V28, ..."""
    return chr(ord("A") + index) if index < 26 else f"V{index + 1}"


def compare_settings(
    aligned: Sequence[Aligned], groups: Sequence[Sequence[int]], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Section]:
    """Compare in every setting. `groups`: which of the evaluations are the runs of each variant."""
    sections = []
    for a in aligned:
        tallies = [tally([[p.counts for p in a.prompts(run)] for run in group]) for group in groups]
        categories: dict[str, list[int]] = {}
        for position, prompt in enumerate(a.prompts(0)):
            categories.setdefault(prompt.category, []).append(position)
        scopes = {ALL: compare_tallies(tallies, seed=seed, resamples=resamples)}
        for category, positions in sorted(categories.items()) if len(categories) > 1 else ():
            some = [t.at(np.array(positions)) for t in tallies]
            scopes[category] = compare_tallies(some, seed=seed, resamples=resamples)
        sections.append(Section(a.setting, a.num_left_out, scopes))
    return sections


def best_first(variants: Sequence[Variant], sections: Sequence[Section]) -> list[int]:
    """Indices of the variants by their acceptance length, a mean over the settings; unmeasured ones last."""

    def length(index: int) -> float:
        found = [estimate.length for s in sections if (estimate := s.scopes[ALL].lengths[index])]
        return float(np.mean(found)) if found else -np.inf

    return sorted(range(len(variants)), key=lambda i: (-length(i), i))


def verdicts(variants: Sequence[Variant], section: Section) -> list[str]:
    """One sentence for every variant but the baseline, over all prompts."""
    pairs = zip(variants[1:], section.scopes[ALL].differences[1:], strict=True)
    return [verdict(v.label, variants[0].label, difference) for v, difference in pairs]


def method(variants: Sequence[Variant], sections: Sequence[Section], seed: int, resamples: int) -> list[str]:
    """How the intervals and verdicts were made, and what they do not say, in words."""
    several = [v for v in variants if v.num_runs > 1]
    single = ", ".join(v.label for v in variants if v.num_runs == 1)
    lines = [
        "acceptance length: tokens per verification step with the bonus token, pooled by step",
        f"intervals: {100 * CONFIDENCE:.0f} % percentile bootstrap, {resamples:,} resamples, seed {seed}; prompts are "
        "drawn with replacement, the same ones for every variant",
    ]
    for v in several:
        lines.append(
            f"seeds of {v.label}: in every resample {v.num_runs - 1} of its {v.num_runs} runs, drawn with "
            f"replacement beside the prompts"
            + ("; two seeds tell little of their spread" * (v.num_runs == 2))
        )
    if single:
        lines.append(f"one run of {single}: the interval does not cover training again with another seed")
    num_pairs, num_scopes = len(variants) - 1, sum(len(s.scopes) for s in sections)
    if num_pairs > 1:
        lines.append(
            f"{num_pairs} variants against {variants[0].label}: verdicts by Holm's correction over them, "
            "intervals without; the others were not held against each other"
        )
    if num_scopes > 1:
        lines.append(
            f"no correction over the {num_scopes} settings and categories: one in twenty shows a difference "
            "that is none"
        )
    return lines


def rows(variants: Sequence[Variant], sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    """One flat row per setting, category and variant, for a CSV or JSON."""
    for section in sections:
        for scope, compared in section.scopes.items():
            for v, length, difference in zip(variants, compared.lengths, compared.differences, strict=True):
                yield {
                    **asdict(section.setting),
                    "category": scope,
                    "num_prompts": compared.num_prompts,
                    "variant": v.label,
                    "runs": " ".join(v.members),
                    "num_runs": v.num_runs,
                    "acceptance_length": length and length.length,
                    "low": length and length.low,
                    "high": length and length.high,
                    "difference": difference and difference.estimate,
                    "difference_low": difference and difference.low,
                    "difference_high": difference and difference.high,
                    "p": difference and difference.p_value,
                    "p_holm": difference and difference.p_holm,
                    "shown": difference and difference.shown,
                }
