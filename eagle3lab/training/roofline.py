"""How fast a stretch of training was, beside what the hardware could do, and what held a run back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from eagle3lab.config.flops import StepWork

from .loader import PackLoader

DATA_WAIT_SHARE = 0.03  # of training time; more than this and the store is the limit
FULL_MEMORY_SHARE = 0.9  # of the device
GOOD_MFU = 0.4
SHORT_PACK_SECONDS = 0.005  # at peak speed: below it, starting the work takes as long as doing it


@dataclass(frozen=True)
class Stretch:
    """Sums over some updates. What is counted by rank 0 for itself alone says so."""

    seconds: float = 0.0
    updates: int = 0
    packs: int = 0  # rank 0
    tokens: int = 0  # real ones, all ranks
    supervised: float = 0.0  # tokens, all ranks
    wait_seconds: float = 0.0  # rank 0
    bytes_read: int = 0  # of states, rank 0
    needed_flops: float = 0.0  # rank 0

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_second(self, amount: float) -> float:
        return amount / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        return min(1.0, self.per_second(self.wait_seconds))

    @property
    def needed_tflops(self) -> float:
        """Per second and device, in 1e12, of the work needed (`config.flops`)."""
        return self.per_second(self.needed_flops) / 1e12

    def mfu(self, peak_tflops: float | None) -> float | None:
        """Needed work as a share of the device's peak; None where either is unknown."""
        return self.needed_tflops / peak_tflops if peak_tflops and self.needed_flops else None

    def figures(self, num_replicas: int, peak_tflops: float | None) -> dict[str, float]:
        """The named figures of a logging interval; those that are unknown are left out."""
        figures = {
            "speed/tokens_per_second": self.per_second(self.tokens),
            "speed/supervised_tokens_per_second": self.per_second(self.supervised),
            "speed/data_wait_share": self.wait_share,
            "speed/read_gb_per_second": self.per_second(self.bytes_read * num_replicas) / 1e9,
        }
        if self.needed_flops:
            figures["speed/needed_tflops_per_device"] = self.needed_tflops
        mfu = self.mfu(peak_tflops)
        return figures if mfu is None else figures | {"speed/mfu": mfu}


class Speedometer:
    """Turns what was trained and what the loader gave into one `Stretch` per logging interval.

    needed_flops: of the work that the loader counts; None leaves MFU out.
    """

    def __init__(
        self,
        num_replicas: int,
        peak_tflops: float | None,
        needed_flops: Callable[[StepWork], float] | None = None,
    ) -> None:
        self.num_replicas = num_replicas
        self.peak_tflops = peak_tflops
        self.needed_flops = needed_flops
        self._first: Stretch | None = None
        self._later: Stretch | None = None
        self._given = Stretch()  # by the loader, up to the last interval

    @property
    def steady(self) -> Stretch:
        """All intervals but the first, which holds compilation; the first where it is the only one."""
        return self._later or self._first or Stretch()

    def interval(self, trained: Stretch, loader: PackLoader) -> dict[str, float]:
        """The figures of the interval that ends now. `trained`: its seconds, updates and tokens."""
        flops = self.needed_flops(loader.work) if self.needed_flops and loader.work else 0.0
        given = Stretch(
            packs=loader.packs,
            wait_seconds=loader.wait_seconds,
            bytes_read=loader.bytes_read,
            needed_flops=flops,
        )
        trained = replace(
            trained,
            packs=given.packs - self._given.packs,
            wait_seconds=given.wait_seconds - self._given.wait_seconds,
            bytes_read=given.bytes_read - self._given.bytes_read,
            needed_flops=given.needed_flops - self._given.needed_flops,
        )
        self._given = given
        if self._first is None:
            self._first = trained
        else:
            self._later = trained if self._later is None else self._later + trained
        return trained.figures(self.num_replicas, self.peak_tflops)


@dataclass(frozen=True)
class Limit:
    """What held a run back, in a word, and the figures that say so with what would help."""

    name: str  # start-up, validation, data, memory, too-small updates, compute
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def find_limit(
    steady: Stretch,
    *,
    first_seconds: float,
    pause_seconds: float,
    peak_tflops: float | None,
    peak_memory_gib: float,
    device_memory_gib: float | None,
) -> Limit:
    """The first that applies of what can limit a run, looked at from the outside in.

    steady: training after the start. first_seconds: everything before it, compilation included.
    pause_seconds: validating and saving.
    """
    total = steady.seconds + first_seconds + pause_seconds
    mfu = steady.mfu(peak_tflops)
    if first_seconds > total / 2:
        return Limit(
            "start-up",
            f"{first_seconds:.1f} of {total:.1f} s passed before the speed was steady; a longer run, or a kept "
            "TORCHINDUCTOR_CACHE_DIR, spreads them",
        )
    if pause_seconds > total / 2:
        return Limit(
            "validation",
            f"{pause_seconds:.1f} of {total:.1f} s went into validating and saving; "
            "train.validate_every_updates=N with a larger N, and train.acceptance.every_updates where it is set",
        )
    if steady.wait_share > DATA_WAIT_SHARE:
        return Limit(
            "data",
            f"{steady.wait_share:.1%} of the time training waited for packs; a larger "
            "hardware.num_loader_threads, a faster disk, or a store with extract.dtype=float8_e4m3 "
            "or extract.last_state=supervised",
        )
    if mfu is None:
        return Limit("compute", "nothing else took time (MFU n/a: hardware.peak_tflops is not set)")
    if mfu < GOOD_MFU and device_memory_gib and peak_memory_gib > FULL_MEMORY_SHARE * device_memory_gib:
        return Limit(
            "memory",
            f"{peak_memory_gib:.1f} of {device_memory_gib:.1f} GiB are taken at an MFU of {mfu:.0%}: no room for "
            "longer packs; a smaller train.seq_len with more tokens_per_update, or more devices",
        )
    assert peak_tflops is not None
    at_peak = steady.needed_flops / max(steady.packs, 1) / (peak_tflops * 1e12)
    if mfu < GOOD_MFU and at_peak < SHORT_PACK_SECONDS:
        return Limit(
            "too-small updates",
            f"a pack needs {1000 * at_peak:.2f} ms at the device's peak, less than it takes to start the work; "
            "a larger train.seq_len",
        )
    return Limit("compute", f"MFU {mfu:.0%} of {peak_tflops:g} TFLOP/s")
