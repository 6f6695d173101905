"""What Hydra knows about a job beside its configuration, and the paths and names that follow from it."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from . import names
from .options import options_of
from .schema import DataConfig, EvaluateRoot, ModelConfig, TrainRoot
from .stamp import launched_by, run_stamp

_ENTRIES = ("train", "extract", "evaluate")


@dataclass(frozen=True)
class Invocation:
    """What Hydra knows about this job and the typed configuration does not say."""

    cwd: Path = field(default_factory=Path.cwd)
    overrides: tuple[str, ...] = ()
    choices: dict[str, str | None] = field(default_factory=dict)
    sweep_dir: Path | None = None
    job_num: int = 0
    began: float = field(default_factory=time.perf_counter, compare=False)
    config_flags: tuple[str, ...] = ()  # -cd DIR -cn NAME, of a primary configuration that is not conf/'s own

    @classmethod
    def current(cls) -> Invocation:
        return cls.of(cast(DictConfig, HydraConfig.get()))

    @classmethod
    def of(cls, config: DictConfig, job_num: int | None = None) -> Invocation:
        """From a composed `hydra` node; `job_num` where Hydra has not set it yet."""
        sweeping = config.mode is RunMode.MULTIRUN
        cwd = Path(config.runtime.cwd)
        number = config.job.num if sweeping and job_num is None else job_num
        return cls(
            cwd=cwd,
            overrides=_as_typed(config),
            choices={k.removesuffix("/extract"): v for k, v in config.runtime.choices.items()},
            sweep_dir=cwd / config.sweep.dir if sweeping else None,
            job_num=number or 0,
            config_flags=_config_flags(config),
        )

    def seconds_before(self, of_process: float) -> float:
        """Seconds this job took until now. `of_process`: those of the process, which a sweep's later jobs share."""
        return of_process if self.job_num == 0 else time.perf_counter() - self.began

    def path(self, text: str) -> Path:
        """A path of the configuration, taken from the directory of the call."""
        return (self.cwd / Path(text).expanduser()).absolute()

    def text(self, path: str | None) -> str | None:
        """The same for a field: None stays None; `asset:NAME` is a shipped file, `package:NAME` a fetched one."""
        return path if path is None or path.startswith(("asset:", "package:")) else str(self.path(path))

    def resume_command(self, run_dir: Path) -> str:
        """What to type to go on with a training run of this job, with the launcher it was started by."""
        command = [*launched_by(), "train.py"]
        set_here = ("run_dir", "resume", "outputs")
        kept = [word for word in self.overrides if word.split("=", 1)[0] not in set_here]
        return shlex.join([*command, *self.single_run_flags(), *kept, f"run_dir={run_dir}", "resume=true"])

    def single_run_flags(self) -> tuple[str, ...]:
        """What makes a command with this job's overrides one run of the same primary configuration."""
        return (*self.config_flags, "hydra.mode=RUN") if self.config_flags else ()

    def groups(self) -> dict[str, str]:
        order = (
            "model",
            "data",
            "hardware",
            "noise",
            "draft",
            "loss",
            "optim",
            "logger",
            "prompts",
            "experiment",
        )
        return {group: str(self.choices[group]) for group in order if self.choices.get(group)}


def _as_typed(config: DictConfig) -> tuple[str, ...]:
    """The overrides, with `${...}` in them as text: it belongs to the configuration, not to Hydra's own."""
    return tuple(map(str, OmegaConf.to_container(config.overrides.task, resolve=False)))  # type: ignore[arg-type]


def _config_flags(config: DictConfig) -> tuple[str, ...]:
    """`-cd DIR -cn NAME` as given on the command line, the directory absolute."""
    given = [source.path for source in config.runtime.config_sources if source.provider == "command-line"]
    directory = ("-cd", str(given[0])) if given else ()
    name = config.job.config_name
    return (*directory, "-cn", str(name)) if name not in (None, *_ENTRIES) else directory


def extract_command(words: Sequence[str]) -> str:
    """The `extract.py` that writes the store which a `train.py` with these words reads by default."""
    usable = options_of("experiment", "extract")
    chosen = [
        word
        for word, (key, _, value) in ((word, word.partition("=")) for word in words)
        if key.partition(".")[0] in ("model", "data", "hardware") or (key == "experiment" and value in usable)
    ]
    return shlex.join(["python", "extract.py", *chosen])


def absolute_model(model: ModelConfig, invocation: Invocation) -> ModelConfig:
    """`model` with its paths taken from the directory of the call."""
    return dataclasses.replace(
        model,
        path=invocation.text(model.path),
        tokenizer=invocation.text(model.tokenizer),
        template=invocation.text(model.template),
    )


def absolute_data(data: DataConfig, invocation: Invocation) -> DataConfig:
    """`data` with its paths taken from the directory of the call."""
    return dataclasses.replace(data, paths=[str(invocation.text(path)) for path in data.paths])


def default_store(model: ModelConfig, data: DataConfig, invocation: Invocation) -> Path:
    """Where `extract.py` writes and `train.py` looks when `store` is not given."""
    return invocation.path(names.store_name(model.name, data.name, regenerated=data.regenerate))


def evaluation_directory(cfg: EvaluateRoot, invocation: Invocation) -> Path:
    """Where `evaluate.py` writes: beside the draft, one directory for each set of prompts, unless `out` says."""
    if cfg.out:
        return invocation.path(cfg.out)
    return invocation.path(cfg.draft_dir).parent / f"evaluation-{names.safe_name(cfg.prompts.name)}"


def named(cfg: TrainRoot, invocation: Invocation) -> TrainRoot:
    """Fill the default store, run name and run directory; every path becomes absolute."""
    run_name = cfg.run_name or names.run_name(cfg, invocation.overrides)
    folder = names.safe_name(run_name)
    if cfg.run_dir:
        run_dir = invocation.path(cfg.run_dir)
    elif invocation.sweep_dir is not None:
        run_dir = invocation.sweep_dir / f"{invocation.job_num:02d}-{folder}"
    else:
        run_dir = invocation.path(cfg.outputs) / folder / run_stamp()
    store = invocation.path(cfg.store) if cfg.store else default_store(cfg.model, cfg.data, invocation)
    acceptance = dataclasses.replace(
        cfg.train.acceptance, prompts=invocation.text(cfg.train.acceptance.prompts)
    )
    return dataclasses.replace(
        cfg,
        train=dataclasses.replace(cfg.train, acceptance=acceptance),
        run_name=run_name,
        run_dir=str(run_dir),
        store=str(store),
        data=absolute_data(cfg.data, invocation),
        model=absolute_model(cfg.model, invocation),
    )
