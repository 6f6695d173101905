"""What the system says of a place it cannot use, as a user's mistake: which place, and what belongs there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import Problem, UserError

_REACH = "a place that this user may read and write"
# a file that is missing is not among them: who needs one says which, and how it is made
_EXPECTED = {
    errno.EISDIR: "a file: move the directory away",
    errno.ENOTDIR: "a directory",
    errno.EEXIST: "a directory, or nothing yet",
    errno.ENAMETOOLONG: "names of at most 255 bytes",
    errno.ELOOP: "a link that leads somewhere",
    errno.EACCES: _REACH,
    errno.EPERM: _REACH,
    errno.EROFS: _REACH,
}


@contextmanager
def usable_places() -> Iterator[None]:
    """Around a command. Raises UserError in place of an OSError that a path of the user's explains."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename
        if place is None or error.errno not in _EXPECTED:
            raise
        what = f"cannot use {place} ({error.strerror})"
        raise UserError(Problem(what, expected=_EXPECTED[error.errno])) from error
