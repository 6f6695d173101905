"""What a store says about itself: `manifest.json`, and how it is held against what a run wants."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, IntegrityError, Problem, UserError, raise_all
from eagle3lab.config.schema import LastState
from eagle3lab.store.disk import BYTES_PER_VALUE
from eagle3lab.store.files import write_text

FORMAT = "eagle3lab-store"
FORMAT_VERSION = 2
SOME_LAST_STATES_VERSION = 3  # 2 with `last_state_rows`; a store that keeps all last states stays 2
READABLE_VERSIONS = (1, 2, 3)  # 1 had no checksums of the manifest and the small files, and no parts
MANIFEST_FILE = "manifest.json"
LAYER_CONVENTION = "hf_hidden_states"  # id k is the output of decoder layer k, counted from 1
LAST_STATE = "pre_norm"  # residual stream after the last layer, before the final norm

_MEANING = {
    "planned_rows_hash": "planned_rows_hash (the rows, their order or their split)",
    "last_state_rows": "last_state_rows (extract.last_state)",
}
_WRITTEN_LATER = ("complete", "accounting", "row_settings", "format_version", "checksums")
_OF_UNFINISHED_WORK = ("engine", "shard_tokens")


@dataclass(frozen=True)
class VerifierIdentity:
    """Which verifier the states come from. `name` is a label; the other fields decide."""

    architecture: str
    config_hash: str
    weight_fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    name: str = ""


@dataclass(kw_only=True)
class Manifest:
    """The contents of `manifest.json`. The writer fills the totals, `planned_rows_hash`, `complete` and
    `checksums`.

    A part holds the shards `part`, `part + num_parts`, ... of the plan; totals and plan are the whole's.
    """

    format_version: int = FORMAT_VERSION
    verifier: VerifierIdentity
    tokenizer_hash: str
    template_hash: str
    template_args_hash: str
    layer_ids: tuple[int, ...]
    layer_convention: str = LAYER_CONVENTION
    last_state: str = LAST_STATE
    last_state_rows: str = LastState.all.value  # at which positions, see `last_states.kept_positions`
    dtype: str  # "bfloat16", "float32", or "float8_e4m3" with an fp32 scale per token and slot
    engine: dict[str, str]  # name and versions
    accounting: dict[str, Any] = field(default_factory=dict)
    row_settings: dict[str, Any] = field(default_factory=dict)  # in words what the hashes decide
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    complete: bool = False
    planned_rows_hash: str = ""
    shard_tokens: int = 0
    part: int = 0
    num_parts: int = 1
    checksums: dict[str, str] = field(default_factory=dict)  # sha256 of the index and of the token counts

    def __post_init__(self) -> None:
        self.layer_ids = tuple(int(k) for k in self.layer_ids)
        if not self.all_last_states:
            self.format_version = SOME_LAST_STATES_VERSION

    @property
    def all_last_states(self) -> bool:
        """Whether the last state is there at every position."""
        return self.last_state_rows == LastState.all.value

    def to_json(self) -> str:
        values = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        if self.all_last_states:
            del values["last_state_rows"]
        return json.dumps({**values, "sha256": _seal(values)}, indent=2, sort_keys=True) + "\n"

    def of_whole(self) -> Manifest:
        """What the parts of a store have in common: the manifest of the finished whole."""
        return replace(self, part=0, num_parts=1, complete=True, checksums={})


def _seal(values: dict[str, Any]) -> str:
    """sha256 of everything that a manifest says."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_hash(manifest: Manifest) -> str:
    """Hex sha256 of the whole manifest, engine and accounting included: by it a run knows its store again."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def is_store(path: Path) -> bool:
    """Whether `path` is a directory that eagle3lab began to write as a store."""
    return (path / MANIFEST_FILE).is_file()


def is_complete(path: Path) -> bool:
    """Whether `path` is a finished store and no part of one, by its manifest alone."""
    if not is_store(path):
        return False
    manifest = read_manifest(path)
    return manifest.complete and manifest.num_parts == 1


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `path/manifest.json` at once or not at all."""
    write_text(path / MANIFEST_FILE, manifest.to_json())


def read_manifest(path: Path) -> Manifest:
    """Read `path/manifest.json`.

    Raises IntegrityError when it is no manifest of a store, UserError for a format this version
    does not read.
    """
    file = path / MANIFEST_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        seal = values.pop("sha256", None)
        found = _seal(values)
        if values.pop("format") != FORMAT:
            raise ValueError("it is not marked as a store")
        version = values["format_version"]
        if version in READABLE_VERSIONS:
            if ("last_state_rows" in values) != (version == SOME_LAST_STATES_VERSION):
                raise ValueError(
                    f"last_state_rows does not belong to format version {version}, or is missing"
                )
            verifier = VerifierIdentity(**values.pop("verifier"))
            manifest = Manifest(verifier=verifier, **values)
            _check_fields(manifest)
            if version > 1 and seal != found:
                raise ValueError(f"it was changed after it was written: its sha256 is {found}, not {seal}")
            return manifest
    except DAMAGED_JSON as error:
        raise IntegrityError(Problem(f"{file} is not the manifest of a store ({error})")) from error
    raise UserError(
        Problem(
            f"{file} has another format version",
            value=version,
            expected=" or ".join(map(str, READABLE_VERSIONS)),
            fix="read it with the eagle3lab that wrote it, or extract it again into another store=DIRECTORY",
        )
    )


def _check_fields(manifest: Manifest) -> None:
    if manifest.dtype not in BYTES_PER_VALUE:
        raise ValueError(f"dtype {manifest.dtype!r} is none of {sorted(BYTES_PER_VALUE)}")
    if manifest.layer_convention != LAYER_CONVENTION:
        raise ValueError(f"layer_convention {manifest.layer_convention!r} is not {LAYER_CONVENTION!r}")
    if manifest.last_state != LAST_STATE:
        raise ValueError(f"last_state {manifest.last_state!r} is not {LAST_STATE!r}")
    LastState(manifest.last_state_rows)
    if not 0 <= manifest.part < manifest.num_parts:
        raise ValueError(f"part {manifest.part} of {manifest.num_parts} does not exist")
    if not manifest.layer_ids or len(set(manifest.layer_ids)) != len(manifest.layer_ids):
        raise ValueError(f"layer_ids {manifest.layer_ids} are empty or repeated")


def check_resumable(path: Path, stored: Manifest, wanted: Manifest) -> None:
    """Raise UserError naming every field in which the store at `path` is not the one `wanted` plans.

    An unfinished store must also have the same engine and shard size, since work would be mixed.
    """
    ignored = _WRITTEN_LATER + (_OF_UNFINISHED_WORK if stored.complete else ())
    names = [f.name for f in fields(Manifest) if f.name not in ignored and f.name != "verifier"]
    pairs = _verifier_pairs(stored.verifier, wanted.verifier)
    pairs += [(name, getattr(stored, name), getattr(wanted, name)) for name in names]
    problems = [
        Problem(
            f"the store {path} was written with another {_MEANING.get(name, name)}",
            value=old,
            expected=f"{new!r} as now",
        )
        for name, old, new in pairs
        if old != new
    ]
    if problems:
        fix = "store=ANOTHER_DIRECTORY, or delete this store, or undo the change"
        problems[-1] = replace(problems[-1], fix=fix)
    raise_all(problems)


def check_identity(manifest: Manifest, verifier: Any, layer_ids: Sequence[int] = ()) -> None:
    """Raise UserError when the store is of another verifier or lacks one of `layer_ids`.

    `verifier` is a VerifierIdentity or anything with some of its attributes (VerifierFacts); those
    it has are compared, `name` never.
    """
    pairs = _verifier_pairs(manifest.verifier, verifier)
    other = {name: (old, new) for name, old, new in pairs if old != new}
    problems = []
    if other:
        problems.append(
            Problem(
                f"the store is of another verifier ({manifest.verifier.name}); they differ in {', '.join(other)}",
                value={name: old for name, (old, _) in other.items()},
                expected=f"{ {name: new for name, (_, new) in other.items()} }",
                fix="model=THE_ONE_THAT_WAS_EXTRACTED, or store=DIRECTORY of this verifier",
            )
        )
    problems += _missing_layers(manifest, layer_ids)
    raise_all(problems)


def _verifier_pairs(stored: VerifierIdentity, wanted: Any) -> list[tuple[str, Any, Any]]:
    names = [f.name for f in fields(VerifierIdentity) if f.name != "name" and hasattr(wanted, f.name)]
    return [(name, getattr(stored, name), getattr(wanted, name)) for name in names]


def check_template_args(manifest: Manifest, template_args: Mapping[str, Any]) -> None:
    """Raise UserError when the store's rows were rendered with other arguments of the chat template."""
    stored = manifest.row_settings.get("template_args")
    if stored is not None and stored != dict(template_args):
        words = ", ".join(f"{key}: {json.dumps(value)}" for key, value in stored.items())
        raise UserError(
            Problem(
                "model.template_args are not those that the store's rows were rendered with",
                value=dict(template_args),
                expected=f"{stored}",
                fix=f"'model.template_args={{{words}}}', or extract.py again into another store=DIRECTORY",
            )
        )


def check_layer_ids(manifest: Manifest, layer_ids: Sequence[int]) -> None:
    """Raise UserError when the store lacks one of `layer_ids`."""
    raise_all(_missing_layers(manifest, layer_ids))


def _missing_layers(manifest: Manifest, layer_ids: Sequence[int]) -> list[Problem]:
    missing = [int(k) for k in layer_ids if k not in manifest.layer_ids]
    if not missing:
        return []
    has = list(manifest.layer_ids)
    all_ids = sorted({*has, *missing})
    fix = f"draft.aux_layer_ids={has}, or extract.py again with extract.layer_ids={all_ids}"
    return [
        Problem(
            "the store does not hold these aux layers",
            value=missing,
            expected=f"some of {has}",
            fix=re.sub(r"(?<=\d), (?=\d)", ",", fix),
        )
    ]
