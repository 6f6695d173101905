"""What the system says of a path is one message that names it; what it says of anything else keeps its traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.places import usable_places


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda here: (here / "folder").read_bytes(), "folder (Is a directory); expected a file"),
        (lambda here: os.replace(here / "file", here / "folder"), "folder (Is a directory)"),
        (lambda here: (here / "file").mkdir(), "file (File exists)"),
        (lambda here: (here / "file" / "x").read_bytes(), "x (Not a directory); expected a directory"),
        (
            lambda here: (here / ("n" * 300)).is_dir(),
            "(File name too long); expected names of at most 255 bytes",
        ),
        (lambda here: (here / "loop").read_bytes(), "loop (Too many levels of symbolic links)"),
    ],
)
def test_a_place_that_cannot_be_used_is_named(
    act: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as caught, usable_places():
        act(tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_no_path_explains_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), usable_places():
        (tmp_path / "none").read_bytes()
    with pytest.raises(OSError, match="Bad file descriptor"), usable_places():
        os.close(987654)
