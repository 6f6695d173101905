"""After which updates a run logs, validates and saves."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3lab.config.schema import TrainerConfig

from .run_plan import RunPlan


@dataclass(frozen=True)
class Milestones:
    """All questions are asked with the number of updates completed, from 1 to the plan's."""

    plan: RunPlan
    log_every: int
    validate_every: int | None  # None: at the end of every epoch
    save_every: int | None  # None: at every validation
    decode_every: int | None = None  # None: never

    @classmethod
    def of(cls, plan: RunPlan, train: TrainerConfig) -> Milestones:
        return cls(
            plan,
            train.log_every_updates,
            train.validate_every_updates,
            train.save_every_updates,
            train.acceptance.every_updates,
        )

    def validates(self, completed: int) -> bool:
        if completed == self.plan.num_updates or self.decodes(completed):
            return True
        if self.validate_every is None:
            return self.plan.ends_epoch(completed - 1)
        return completed % self.validate_every == 0

    def decodes(self, completed: int) -> bool:
        """Whether the validation after this update also measures acceptance by decoding; asked for 0 too."""
        if self.decode_every is None:
            return False
        return completed == self.plan.num_updates or completed % self.decode_every == 0

    def saves(self, completed: int) -> bool:
        return self.validates(completed) or (self.save_every is not None and completed % self.save_every == 0)

    def logs(self, completed: int) -> bool:
        """Also before every validation and save, so that a resumed run logs the same intervals."""
        return completed % self.log_every == 0 or self.saves(completed)
