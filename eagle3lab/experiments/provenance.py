"""Where a result came from: command, choices, code, versions, data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab import __version__

PACKAGES = (
    "torch",
    "transformers",
    "speculators",
    "lightning",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "wandb",
    "vllm",
)


def collect(*, overrides: Sequence[str], choices: Mapping[str, str | None]) -> dict[str, Any]:
    """Provenance of the running command as plain data: the same call gives the same content."""
    return {
        "command": ["python", *sys.argv],
        "overrides": list(overrides),
        "choices": {k: v for k, v in choices.items() if not k.startswith("hydra/")},
        "eagle3lab": __version__,
        "git": git_state(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "hardware": devices(),
        "versions": package_versions(),
    }


def devices() -> dict[str, Any]:
    """The processor, and the CUDA devices where torch is loaded already: this never loads it."""
    found: dict[str, Any] = {"cpu": _processor(), "num_cpus": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["cuda"] = [torch.cuda.get_device_properties(i).name for i in range(count)]
    return found


def _processor() -> str:
    """Its name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Installed versions of the packages a result depends on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state(directory: Path) -> dict[str, Any]:
    """`{"commit", "dirty"}` of the checkout, or nulls outside of one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": bool(status) if status is not None else None}
