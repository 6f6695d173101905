"""What an evaluation found: per prompt, per variant, and as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.evaluate.acceptance import AcceptanceCounts, AcceptanceStats, summarise
from eagle3lab.evaluate.decoder import Decoded, Difference
from eagle3lab.evaluate.prompts import Prompt
from eagle3lab.store.files import write_text

FILE = "evaluation.json"
FORMAT = "eagle3lab-evaluation"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Trial:
    """One prompt decoded with one draft and one k."""

    variant: str  # "trained" or "untrained"
    k: int
    decoded: Decoded
    difference: Difference | None  # from the verifier's own greedy text

    @property
    def counts(self) -> AcceptanceCounts:
        return AcceptanceCounts.from_steps(self.decoded.accepted, self.k)


@dataclass(frozen=True)
class PromptResult:
    """One prompt: the verifier alone and every trial."""

    prompt: Prompt
    num_prompt_tokens: int
    plain: Decoded
    text: str  # the verifier's own
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        trials = [
            {
                "variant": t.variant,
                "k": t.k,
                "accepted_per_step": list(t.decoded.accepted),
                "num_new_tokens": len(t.decoded.tokens),
                "num_cut_tokens": t.decoded.num_cut,
                "seconds": t.decoded.seconds,
                "identical": t.difference is None,
                "difference": asdict(t.difference) if t.difference else None,
            }
            for t in self.trials
        ]
        return {
            "id": self.prompt.prompt_id,
            "category": self.prompt.category,
            "num_turns_left_out": self.prompt.num_turns_left_out,
            "num_prompt_tokens": self.num_prompt_tokens,
            "plain": {"tokens": list(self.plain.tokens), "seconds": self.plain.seconds, "text": self.text},
            "trials": trials,
        }


@dataclass(frozen=True)
class VariantResult:
    """One draft with one k over all prompts."""

    variant: str
    k: int
    overall: AcceptanceStats
    per_category: dict[str, AcceptanceStats]
    num_identical: int  # prompts whose text is the verifier's own, token by token
    num_near_ties: int  # of the others, those that rounding explains
    plain_tokens_per_second: float | None  # decoding alone: the prompt's forward is in neither
    draft_tokens_per_second: float | None
    speed_ratio: float | None  # wall time per emitted token, plain over drafted, in this process


@dataclass(frozen=True)
class Evaluation:
    """A whole run. `setup` says what was decoded with what."""

    setup: dict[str, Any]
    variants: tuple[VariantResult, ...]
    prompts: tuple[PromptResult, ...]

    def variant(self, name: str = "trained", k: int | None = None) -> VariantResult:
        """The result of one variant; without `k` the first one measured."""
        return next(v for v in self.variants if v.variant == name and k in (None, v.k))

    @property
    def unexplained(self) -> list[tuple[str, Trial]]:
        """Prompt ids and trials whose text differs from the verifier's own by more than rounding."""
        return [
            (result.prompt.prompt_id, trial)
            for result in self.prompts
            for trial in result.trials
            if trial.difference is not None and not trial.difference.near_tie
        ]

    def write(self, directory: Path) -> Path:
        """`directory/evaluation.json`, at once or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "conventions": {
                "acceptance_length": "tokens per verification step, with bonus: 1 + accepted / drafts",
                "conditional_acceptance": "P(position j accepted | positions before it accepted)",
                "unconditional_acceptance": "P(positions 0..j accepted)",
                "draft_acceptance_rate": "accepted / drafted tokens",
                "steps": "a step counts in full, even if the end token or the budget cut its text (as in vLLM)",
                "interval": "95 % percentile bootstrap over prompts",
            },
            "setup": self.setup,
            "variants": [asdict(v) for v in self.variants],
            "prompts": [p.to_json() for p in self.prompts],
        }
        write_text(directory / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return directory / FILE


def summarise_variant(variant: str, k: int, results: Sequence[PromptResult], *, seed: int) -> VariantResult:
    """Pool the trials of one variant and k."""
    trials = [next(t for t in r.trials if (t.variant, t.k) == (variant, k)) for r in results]
    by_category: dict[str, list[AcceptanceCounts]] = {}
    for result, trial in zip(results, trials, strict=True):
        by_category.setdefault(result.prompt.category, []).append(trial.counts)
    plain = _tokens_per_second([r.plain for r in results])
    drafted = _tokens_per_second([t.decoded for t in trials])
    differences = [t.difference for t in trials if t.difference is not None]
    return VariantResult(
        variant=variant,
        k=k,
        overall=summarise([t.counts for t in trials], seed=seed),
        per_category={name: summarise(counts, seed=seed) for name, counts in sorted(by_category.items())},
        num_identical=len(trials) - len(differences),
        num_near_ties=sum(d.near_tie for d in differences),
        plain_tokens_per_second=plain,
        draft_tokens_per_second=drafted,
        speed_ratio=drafted / plain if plain and drafted else None,
    )


def _tokens_per_second(decoded: Sequence[Decoded]) -> float | None:
    """The first token comes from the prompt's forward, which is not timed."""
    seconds = sum(d.seconds for d in decoded)
    num_tokens = sum(len(d.tokens) - 1 for d in decoded)
    return num_tokens / seconds if seconds and num_tokens else None
