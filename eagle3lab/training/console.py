"""The lines a run prints: one per logging interval, one per validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3lab.config.selection import STEP

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(number: float) -> str:
    """`1234567` as `1.23M`."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.3g}{letter}" if number < 999.5 * unit else f"{number / unit:.0f}{letter}"
    return f"{number:.3g}" if number != int(number) else str(int(number))


def clock_text(seconds: float) -> str:
    """`3725` as `1:02:05`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def share_text(share: float | None) -> str:
    """`0.614` as `61.4 %`; n/a for None."""
    return "n/a" if share is None else f"{100 * share:.1f} %"


def interval_line(
    figures: Mapping[str, float], num_updates: int, num_tokens: int, acceptance: float | None
) -> str:
    """Where the run stands: update, tokens, loss, simulated acceptance length, speed and its limits, time left.

    MFU is n/a where the device's peak is unknown.
    """
    speed = figures["speed/tokens_per_second"]
    left = (num_tokens - figures["tokens"]) / speed if speed else 0.0
    simulated = "-" if acceptance is None else f"{acceptance:.3f}"
    return (
        f"update {figures['update']:.0f}/{num_updates}  tokens {short(figures['tokens'])}  "
        f"loss {figures['train/loss']:.4f}  simulated acceptance {simulated}  {short(speed)} tok/s "
        f"({short(figures['speed/supervised_tokens_per_second'])} supervised)  "
        f"MFU {share_text(figures.get('speed/mfu'))}  "
        f"data wait {100 * figures['speed/data_wait_share']:.0f} %  "
        f"read {short(1e9 * figures['speed/read_gb_per_second'])}B/s  {figures['speed/peak_memory_gib']:.1f} GiB  "
        f"ETA {clock_text(left)}"
    )


def validation_line(figures: Mapping[str, float], num_updates: int, domains: Sequence[str] = ()) -> str:
    """One validation: loss, simulated acceptance length and its parts, coverage; acceptance by decoding where
    it was measured; simulated acceptance length by domain where there are several."""
    parts = [value for name, value in figures.items() if name.startswith(STEP)]
    real = figures.get("val/real_acceptance_length")
    return (
        f"update {figures['update']:.0f}/{num_updates}  validation  loss {figures['val/loss']:.4f}  "
        f"simulated acceptance length {figures['val/simulated_acceptance_length']:.3f} "
        f"(1 + {' + '.join(f'{p:.3f}' for p in parts)})  coverage {figures['val/coverage']:.3f}"
        + ("" if real is None else f"  real acceptance length {real:.3f}")
        + "".join(f"\n  {text}" for text in domain_lines(figures, domains))
    )


def domain_lines(figures: Mapping[str, float], domains: Sequence[str]) -> list[str]:
    """One line for every domain that was measured."""
    width = max(map(len, domains), default=0)
    return [
        f"{domain:<{width}}  loss {figures[f'val/{domain}/loss']:.4f}  "
        f"simulated acceptance length {figures[f'val/{domain}/simulated_acceptance_length']:.3f}"
        for domain in domains
        if f"val/{domain}/loss" in figures
    ]
