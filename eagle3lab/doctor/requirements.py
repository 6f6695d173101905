"""The version ranges this project asks for, from the one place that states them: its package metadata."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

OWN_DISTRIBUTION = "eagle3lab"


@dataclass(frozen=True)
class Needs:
    """`python`: the interpreter's range. `required` must be there; `optional` must fit where they are."""

    python: SpecifierSet
    required: tuple[Requirement, ...]
    optional: tuple[Requirement, ...]
    source: str

    def pip_word(self, name: str) -> str:
        """`'name>=1,<2'` as pip takes it; the bare name where no range is known."""
        for requirement in (*self.required, *self.optional):
            if requirement.name == name:
                return f"'{requirement.name}{requirement.specifier}'"
        return name


def project_needs() -> Needs:
    """From pyproject.toml of a checkout (an editable install's metadata may be older), else as installed.

    Raises LookupError where there is neither.
    """
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == OWN_DISTRIBUTION:
            extras = project.get("optional-dependencies", {}).values()
            return Needs(
                SpecifierSet(project["requires-python"]),
                tuple(Requirement(line) for line in project["dependencies"]),
                tuple(Requirement(line) for lines in extras for line in lines),
                "pyproject.toml",
            )
    try:
        own = metadata.distribution(OWN_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise LookupError("neither pyproject.toml nor an installed eagle3lab states the ranges") from None
    lines = [Requirement(line) for line in own.requires or []]
    return Needs(
        SpecifierSet(own.metadata["Requires-Python"]),
        tuple(r for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})),
        tuple(r for r in lines if "extra" in str(r.marker)),
        f"eagle3lab {own.version} as installed",
    )


def installed_version(name: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def contradictions(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """`(package, what it requires, what is there)` wherever installed packages of `names` disagree."""
    present = {name: version for name in names if (version := installed_version(name))}
    for name in present:
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            version = present.get(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if version and applies and not requirement.specifier.contains(version, prereleases=True):
                yield name, f"{requirement.name}{requirement.specifier}", version
