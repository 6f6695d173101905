"""What a run generated, for its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3lab.engines.base import Answer


@dataclass
class Generated:
    """What one run generated."""

    num_answers: int = 0
    num_tokens: int = 0
    num_ended: int = 0  # by themselves
    num_empty: int = 0  # of those: the end token alone
    num_known: int = 0  # answers that earlier runs had generated
    seconds: float = 0.0
    lost: dict[str, str] = field(default_factory=dict)  # "file:line (conversation)" -> why the engine failed

    def count(self, answer: Answer) -> None:
        self.num_answers += 1
        self.num_tokens += len(answer.token_ids)
        self.num_ended += answer.ended
        self.num_empty += len(answer.token_ids) == answer.ended

    def describe(self, num_rows: int) -> str:
        """For the report."""
        text = f"answers: {self.num_known:,} were there"
        if self.num_answers:
            text = (
                f"answers: {self.num_answers:,} generated, {self.num_tokens:,} tokens in {self.seconds:,.1f} s "
                f"({self.num_tokens / max(self.seconds, 1e-9):,.0f} tok/s); "
                f"{self.num_ended / self.num_answers:.1%} ended by themselves, "
                f"{self.num_answers - self.num_ended:,} were cut, {self.num_empty:,} are empty"
            )
            text += f"; {self.num_known:,} were there before" if self.num_known else ""
        return f"{text}; {num_rows:,} rows"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "seconds": round(self.seconds, 3)}
