"""How much disk a store will need, and whether it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError

BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4, "float8_e4m3": 1}
BYTES_PER_SCALE = {"float8_e4m3": 4}  # one for every token and state


def estimate_bytes(
    num_tokens: int, hidden_size: int, num_layer_ids: int, dtype: str, num_last_states: int | None = None
) -> int:
    """Bytes of the hidden states: (tokens x aux layers + last states) x hidden x bytes per value.

    num_last_states: default one per token. fp8 adds its scales. Ids and masks add 9 bytes per token, which is
    below 0.1 % from hidden 2048 on.
    """
    bytes_per_state = hidden_size * BYTES_PER_VALUE[dtype] + BYTES_PER_SCALE.get(dtype, 0)
    num_last = num_tokens if num_last_states is None else num_last_states
    return (num_tokens * num_layer_ids + num_last) * bytes_per_state


def check_free_space(path: Path, num_bytes: int) -> None:
    """Raise UserError when the file system that would hold `path` has fewer than `num_bytes` free."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise UserError(
            Problem(
                f"the store needs {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB) at {path}",
                expected=f"at most the {free:,} bytes ({free / 2**30:.1f} GiB) that are free there",
                fix="store=DIRECTORY on a larger disk, or fewer tokens with data.max_tokens=N",
            )
        )
