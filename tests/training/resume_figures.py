"""Bitwise resume on CPU, in figures: `python tests/training/resume_figures.py [NUMBER_OF_KILLS]`.

Every line is one run that was ended and resumed, against the run that never was: the largest difference of its
weights, its optimizer states and everything it logged. Ends with 1 when one of them is not 0.0.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from eagle3lab.config.names import CHECKPOINTS, METRICS
from eagle3lab.config.schema import Schedule, TrainerConfig, TrainingStep
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_files import LAST, UNFINISHED, fault_of, find_resume_point
from eagle3lab.training.trainer import fit

UPDATES_PER_EPOCH = 4  # 8 packs in updates of 2
STOPS = {"mid-epoch": 6, "last batch of an epoch": 7, "end of an epoch": 8, "first update": 1}
FIRST_SAVE_CALLS = 8  # patched calls of the start and the first save; kills come after them


@dataclass(frozen=True)
class Setting:
    """One store and one configuration: 12 updates in 3 epochs with noise, every update saved and logged."""

    tiny: ModuleType
    store: StoreReader

    def run(self, path: Path, *, resume: bool = False, loggers: tuple[Any, ...] = ()) -> Any:
        tiny = self.tiny
        train = TrainerConfig(
            seq_len=tiny.SEQ_LEN,
            tokens_per_update=2 * tiny.SEQ_LEN,
            max_epochs=3,
            log_every_updates=1,
            save_every_updates=1,
        )
        optim = tiny.optim(schedule=Schedule.cosine, lr_warmup_updates=3)
        module, data = tiny.build(self.store, train, noise=0.05, optim=optim, step=TrainingStep.pruned)
        return fit(
            module,
            data,
            hardware=tiny.hardware(),
            train=train,
            run_dir=path,
            loggers=loggers,
            resume=resume,
        )


def differences(one: Path, two: Path) -> dict[str, float]:
    """Largest absolute difference between two runs of weights, optimizer and logged figures (speed aside)."""
    first, second = (torch.load(p / CHECKPOINTS / LAST, weights_only=True) for p in (one, two))
    rows_one, rows_two = (_rows(p / METRICS) for p in (one, two))
    return {
        "weights": _largest(first["state_dict"], second["state_dict"]),
        "optimizer": _largest(first["optimizer_states"], second["optimizer_states"]),
        "logged": _largest(rows_one, rows_two),
    }


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as f:
        return [
            {k: float(v) for k, v in row.items() if v and not k.startswith("speed/")}
            for row in csv.DictReader(f)
        ]


def _largest(one: Any, two: Any) -> float:
    """Over two nested structures, which must have the same shape."""
    if isinstance(one, torch.Tensor):
        assert one.shape == two.shape
        assert one.dtype == two.dtype
        return float((one.double() - two.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        assert one.keys() == two.keys(), (one.keys(), two.keys())
        return max((_largest(one[key], two[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        return max((_largest(a, b) for a, b in zip(one, two, strict=True)), default=0.0)
    if isinstance(one, (int, float)):
        return abs(float(one) - float(two))
    assert one == two
    return 0.0


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process, which has torch loaded already; returns its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def killed_before_call(setting: Setting, path: Path, number: int) -> bool:
    """Run until just before the `number`-th call that writes, syncs, links or renames; False if it ended."""

    def work() -> None:
        calls = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for module, name in ((torch, "save"), (os, "fsync"), (os, "link"), (os, "replace")):
            setattr(module, name, counted(getattr(module, name)))
        setting.run(path)

    return os.WIFSIGNALED(os.waitpid(in_child(work), 0)[1])


def killed_inside_the_file(setting: Setting, path: Path, save: int, share: float) -> None:
    """Run until this save has written that share of its file."""

    def work() -> None:
        original, saves = torch.save, 0

        def half(content: Any, file: Any) -> None:
            nonlocal saves
            saves += 1
            if saves < save:
                return original(content, file)
            blob = io.BytesIO()
            original(content, blob)
            file.write(blob.getvalue()[: int(share * len(blob.getvalue()))])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        torch.save = half
        setting.run(path)

    assert os.WIFSIGNALED(os.waitpid(in_child(work), 0)[1])


def killed_during_a_save(setting: Setting, path: Path, rng: random.Random) -> bool:
    """Run until a save is seen to have begun, then a random moment longer; False if it ended before."""
    child = in_child(lambda: setting.run(path))
    saves, unfinished = rng.randrange(1, 8), path / CHECKPOINTS / UNFINISHED
    seen = False
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if unfinished.exists() and not seen:
            saves -= 1
            if saves == 0:
                time.sleep(rng.uniform(0, 0.008))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return True
        seen = unfinished.exists()
    return False


def what_is_left(path: Path) -> str:
    """Where a kill hit, from the files it left."""
    unfinished = path / CHECKPOINTS / UNFINISHED
    if not unfinished.exists():
        return "between saves"
    return "inside the file" if fault_of(unfinished) else "between file and rename"


def resumed(setting: Setting, whole: Path, path: Path) -> tuple[int, dict[str, float]]:
    """Resume the run in `path`; returns the update it went on from and its differences from `whole`."""
    point = find_resume_point(path / CHECKPOINTS)
    setting.run(path, resume=True)
    return point.num_updates, differences(whole, path)


def load_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_run"] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def main(num_kills: int) -> int:
    torch.set_num_threads(1)
    tiny = load_tiny()
    bad, moments, rng = 0, Counter[str](), random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        setting = Setting(tiny, tiny.write_store(here / "store", tiny.default_rows()))

        def line(name: str, path: Path) -> None:
            nonlocal bad
            with silent():
                start, figures = resumed(setting, here / "whole", path)
            bad += any(figures.values())
            text = "  ".join(f"{key} {value!r}" for key, value in figures.items())
            print(f"{name:<44} resumed after update {start:>2}  largest difference: {text}", flush=True)

        with silent():
            setting.run(here / "whole")
        for name, last in STOPS.items():
            with silent(), contextlib.suppress(tiny.Stop):
                setting.run(here / name, loggers=(tiny.StopAt(last + 1),))
            line(f"stopped: {name} ({last} of 12)", here / name)
        for number in range(FIRST_SAVE_CALLS, FIRST_SAVE_CALLS + 18):
            path = here / f"call{number}"
            assert killed_before_call(setting, path, number)
            line(f"kill -9 before call {number}: {what_is_left(path)}", path)
        for number in range(num_kills):
            path = here / f"inside{number}"
            save, share = rng.randrange(2, 13), rng.random()
            killed_inside_the_file(setting, path, save, share)
            line(f"kill -9 in save {save}, {share:.0%} written", path)
        for number in range(num_kills):
            path = here / f"kill{number}"
            if killed_during_a_save(setting, path, rng) and (path / CHECKPOINTS / LAST).exists():
                moments[what_is_left(path)] += 1
                line(f"kill -9 at random: {what_is_left(path)}", path)
    print(f"random kills by where they hit: {dict(moments)}; runs that differ: {bad}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
