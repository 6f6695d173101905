"""Whether evaluations can be compared at all: same verifier, same prompts, same way of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lab.config.errors import Problem, raise_all
from eagle3lab.evaluate.evaluation_file import (
    CONFIGURATION,
    WEIGHTS,
    Measurement,
    PromptCounts,
    Setting,
)

_SHOWN = 5  # ids named in a message


@dataclass(frozen=True)
class Only:
    """Which settings to compare; empty: all."""

    prompts: Sequence[str] = ()
    k: Sequence[int] = ()
    temperature: Sequence[float] = ()
    backend: Sequence[str] = ()

    def admits(self, setting: Setting) -> bool:
        chosen = ((getattr(self, name), getattr(setting, name)) for name in _DIMENSIONS)
        return all(not wanted or value in wanted for wanted, value in chosen)


_DIMENSIONS = ("prompts", "k", "temperature", "backend")


@dataclass(frozen=True)
class Aligned:
    """One setting, measured by every evaluation over the same prompts."""

    setting: Setting
    prompt_ids: tuple[str, ...]
    num_left_out: int  # prompts that not all of them decoded
    measurements: tuple[Measurement, ...]  # in the order of the evaluations

    def prompts(self, index: int) -> list[PromptCounts]:
        """The compared prompts of one evaluation."""
        return [self.measurements[index].prompts[i] for i in self.prompt_ids]


def align(
    given: Mapping[str, Sequence[Measurement]], only: Only | None = None, *, common_prompts: bool = False
) -> list[Aligned]:
    """Bring evaluations side by side, setting by setting.

    Args:
        given: what each thing named by the user holds.
        common_prompts: leave out prompts that not all decoded, instead of refusing.
    Raises:
        UserError: they cannot be compared; every difference is named.
    """
    measured: dict[str, dict[Setting, Measurement]] = {}
    problems: list[Problem] = []
    for name, measurements in given.items():
        measured[name] = {}
        for m in measurements:
            if (only or Only()).admits(m.setting):
                first = measured[name].setdefault(m.setting, m)
                if first is not m:
                    files = f"{first.source} and {m.source}"
                    problems.append(Problem(f"{name} holds {m.setting} twice", files, fix="name one of them"))
    raise_all(problems)
    problems += _other_settings(measured, given)
    raise_all(problems)
    aligned = []
    for setting in next(iter(measured.values())):
        side_by_side = {name: settings[setting] for name, settings in measured.items()}
        problems += _other_conditions(side_by_side)
        problems += _other_prompts(setting, side_by_side)
        common, left_out = _common(side_by_side)
        if not common or (left_out and not common_prompts):
            problems.append(_decoded_by_some(setting, side_by_side, len(common), left_out))
        aligned.append(Aligned(setting, common, len(left_out), tuple(side_by_side.values())))
    raise_all(list(dict.fromkeys(problems)))
    return sorted(aligned, key=lambda a: a.setting)


def notes(aligned: Sequence[Aligned], names: Sequence[str]) -> list[str]:
    """What does not forbid a comparison and is worth knowing."""
    said: list[str] = []
    for a in aligned:
        if any(m.conditions[WEIGHTS] is None for m in a.measurements):
            said.append("not every evaluation names the verifier's weights: only its configuration was held")
        own = [[p.own_text for p in a.prompts(i)] for i in range(len(names))]
        for name, texts in zip(names[1:], own[1:], strict=True):
            pairs = [(x, y) for x, y in zip(own[0], texts, strict=True) if None not in (x, y)]
            if other := sum(x != y for x, y in pairs):
                said.append(
                    f"{a.setting}: the verifier's own greedy text differs between {names[0]} and {name} for "
                    f"{other} of {len(pairs)} prompts: rounding on another device, or another verifier"
                )
        if a.num_left_out:
            said.append(
                f"{a.setting}: compared over the {len(a.prompt_ids)} prompts that all decoded; "
                f"{a.num_left_out} that only some decoded are left out"
            )
    return list(dict.fromkeys(said))


def _other_settings(
    measured: Mapping[str, Mapping[Setting, Measurement]], given: Mapping[str, Sequence[Measurement]]
) -> list[Problem]:
    if empty := [name for name, settings in measured.items() if not settings]:
        held = {name: "; ".join(str(m.setting) for m in given[name]) for name in empty}
        return [Problem("nothing was measured in the settings asked for", _by_value(held, str))]
    if len({frozenset(settings) for settings in measured.values()}) == 1:
        return []
    problems = []
    for dimension in _DIMENSIONS:
        values = {n: sorted({getattr(s, dimension) for s in settings}) for n, settings in measured.items()}
        if len({tuple(v) for v in values.values()}) > 1:
            shared = set.intersection(*map(set, values.values()))
            fix = " ".join(f"--{dimension} {value}" for value in sorted(shared))
            shown = _by_value(values, lambda v: ", ".join(map(str, v)))
            problems.append(
                Problem(f"other {_NAMES[dimension]}", shown, "the same in all", fix or _again(dimension))
            )
    if not problems:
        held = {name: "; ".join(map(str, sorted(settings))) for name, settings in measured.items()}
        problems = [Problem("other settings", _by_value(held, str), "the same in all")]
    return problems


_NAMES = {
    "prompts": "prompts",
    "k": "K (drafted tokens per step)",
    "temperature": "temperature",
    "backend": "back end",
}


def _again(dimension: str) -> str:
    return f"evaluate.py again, with the same {_NAMES[dimension]} for all"


def _other_conditions(side_by_side: Mapping[str, Measurement]) -> list[Problem]:
    problems = []
    for condition in next(iter(side_by_side.values())).conditions:
        known = {
            name: value
            for name, m in side_by_side.items()
            if (value := m.conditions.get(condition)) is not None
        }
        shown = {name: _shown(condition, value, side_by_side[name]) for name, value in known.items()}
        if any(value != next(iter(known.values())) for value in known.values()):
            fix = "evaluate.py again, the same way for all"
            problems.append(Problem(f"other {condition}", _by_value(shown, str), "the same in all", fix))
    return problems


def _shown(condition: str, value: Any, measurement: Measurement) -> str:
    is_hash = condition in (CONFIGURATION, WEIGHTS)
    return f"{measurement.verifier} ({value[:12]})" if is_hash else str(value)


def _other_prompts(setting: Setting, side_by_side: Mapping[str, Measurement]) -> list[Problem]:
    """Prompts of the same id that are not the same prompt, as far as the files tell."""
    (first_name, first), *rest = side_by_side.items()
    problems = []
    for name, m in rest:
        other = [i for i, p in first.prompts.items() if i in m.prompts and not _same(p, m.prompts[i])]
        if other:
            what = f"other text or category under the same prompt id in {first_name} and {name}"
            ids = ", ".join(other[:_SHOWN]) + (" ..." if len(other) > _SHOWN else "")
            problems.append(
                Problem(
                    what,
                    f"{len(other)} prompts of {setting.prompts}: {ids}",
                    "the same prompts, template and tokenizer",
                    _again("prompts"),
                )
            )
    return problems


def _same(a: PromptCounts, b: PromptCounts) -> bool:
    if (a.category, a.num_prompt_tokens) != (b.category, b.num_prompt_tokens):
        return False
    return None in (a.prompt_sha256, b.prompt_sha256) or a.prompt_sha256 == b.prompt_sha256


def _common(side_by_side: Mapping[str, Measurement]) -> tuple[tuple[str, ...], list[str]]:
    """Prompt ids that all decoded, in the first one's order, and those that only some did."""
    every = dict.fromkeys(i for m in side_by_side.values() for i in m.prompts)
    common = tuple(i for i in every if all(i in m.prompts for m in side_by_side.values()))
    return common, [i for i in every if i not in set(common)]


def _decoded_by_some(
    setting: Setting, side_by_side: Mapping[str, Measurement], num_common: int, left_out: Sequence[str]
) -> Problem:
    counts = ", ".join(f"{len(m.prompts)} in {name}" for name, m in side_by_side.items())
    ids = ", ".join(left_out[:_SHOWN]) + (" ..." if len(left_out) > _SHOWN else "")
    return Problem(
        f"not all decoded the same prompts of {setting.prompts}",
        f"{counts}; {num_common} in all; not in all: {ids}",
        "the same prompts",
        "--common-prompts" if num_common else _again("prompts"),
    )


def _by_value(values: Mapping[str, Any], show: Callable[[Any], str]) -> str:
    """`1, 3 in a, b; 3 in c`"""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(show(value), []).append(name)
    return "; ".join(f"{value} in {', '.join(members)}" for value, members in names.items())
