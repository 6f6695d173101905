"""From a model's configuration to the directory that holds it."""

from __future__ import annotations

import os
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import ModelConfig, VerifierSource

ASSETS = Path(__file__).parent.parent / "assets"
CACHE_VARIABLE = "EAGLE3LAB_CACHE"


def locate_verifier(model: ModelConfig, *, quiet: bool = False) -> Path:
    """The verifier's directory: `model.path`, the fetched and cached SmolLM2, or the shipped tiny one.

    The first use of SmolLM2 downloads 93 MB and says so on stderr unless `quiet`; later uses read the cache.
    Raises `UserError` where the directory is missing or cannot be made.
    """
    if model.source is VerifierSource.local:
        return _local(model)
    if model.path is not None:
        raise UserError(
            Problem(
                f"model.path is set, but model.source={model.source.value} has its own files",
                model.path,
                "one of the two",
                f"model=local model.name=my_model model.path={model.path}",
            )
        )
    if model.source is VerifierSource.tiny:
        return asset_path("tiny")
    from eagle3lab.verifier.fetch import fetch_smollm2  # imports torch: only where it is needed

    return fetch_smollm2(cache_dir(), quiet=quiet)


def cache_dir() -> Path:
    """$EAGLE3LAB_CACHE, else $XDG_CACHE_HOME/eagle3lab, else ~/.cache/eagle3lab; not created here."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "eagle3lab"


def asset_path(name: str) -> Path:
    """A file or directory shipped under eagle3lab/assets; raises `UserError` with the names there are."""
    path = (ASSETS / name).resolve()
    if not name or not path.is_relative_to(ASSETS.resolve()) or not path.exists():
        names = ", ".join(sorted(p.name for p in ASSETS.iterdir() if not p.name.startswith("_")))
        raise UserError(Problem("no such shipped asset", name, f"one of: {names}"))
    return path


def _local(model: ModelConfig) -> Path:
    if not model.path:
        raise UserError(
            Problem("no verifier directory is given", None, "model.path", "model.path=/path/to/the/verifier")
        )
    path = Path(model.path).expanduser().absolute()
    if not path.is_dir():
        raise UserError(
            Problem(
                "no such verifier directory",
                str(path),
                "a directory with config.json and *.safetensors",
                "model.path=/path/to/the/verifier",
            )
        )
    return path
