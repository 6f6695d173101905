"""What is said while prompts are decoded: a bar on a terminal, one plain line per prompt or pass in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from eagle3lab.evaluate.acceptance import AcceptanceCounts
from eagle3lab.evaluate.reference import One
from eagle3lab.evaluate.results import Pass, Task, Way


@contextmanager
def progress(console: Console, num_prompts: int) -> Iterator[Callable[[Task, One], None]]:
    """Gives what hears of every decoded prompt."""
    said = 0
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task_id = bar.add_task("decode", total=num_prompts)

        def done(task: Task, found: One) -> None:
            nonlocal said
            said += 1
            bar.advance(task_id)
            if console.is_terminal:
                return
            plain = next(text for way, (text, _) in found.items() if way.k == 0)
            lengths = [
                f"{label(way.variant, way.k, way.temperature)}: {_length([counts])}"
                for way, counts in _counts(found)
                if counts.drafts
            ]
            text = f"decode {said}/{num_prompts} {task.prompt.prompt_id}: {len(plain.tokens)} tokens; {', '.join(lengths)}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield done


def pass_line(found: Pass) -> str:
    """One pass over all prompts."""
    way = found.way
    name = label(way.variant or "verifier alone", way.k or None, way.temperature)
    text = f"decode {name}, {way.batch_size} together: "
    text += f"{len(found.texts)} texts, {found.num_tokens:,} tokens in {found.seconds:.1f} s"
    return text + (f", acceptance length {_length(found.counts)}" if way.k else "")


def label(variant: str, k: int | None, temperature: float) -> str:
    """A draft and k; the temperature where text is sampled."""
    words = [variant, "" if k is None else f"k={k}", f"T={temperature:g}" if temperature else ""]
    return " ".join(filter(None, words))


def _counts(found: One) -> list[tuple[Way, AcceptanceCounts]]:
    return [
        (way, AcceptanceCounts.from_steps(text.accepted, way.k)) for way, (text, _) in found.items() if way.k
    ]


def _length(counts: list[AcceptanceCounts]) -> str:
    drafts = sum(c.drafts for c in counts)
    return f"{1 + sum(c.accepted for c in counts) / drafts:.2f}" if drafts else "-"
