"""What happens to a stored pack on the device: its states are looked at, and fp8 becomes bf16.

The loader hands over what lies in the store. That keeps half the bytes of an fp8 store on the whole way, and
leaves to the CPU nothing but one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3lab.data.shift import LAST_KEPT, SCALES, STATES, Batch
from eagle3lab.store.fp8 import dequantize


def dequantize_batch(batch: Batch) -> Batch:
    """The pack with bf16 states [1, S, n * hidden] in place of fp8 ones and their scales [1, S, n].

    Bit for bit what `StoreReader.read` decodes on the CPU. A pack without scales is returned as it is.
    """
    if not any(name + SCALES in batch for name in STATES):
        return batch
    result = dict(batch)
    for name in STATES:
        scales = result.pop(name + SCALES)
        result[name] = dequantize(batch[name], scales, batch[name].shape[-1] // scales.shape[-1])
    return result


class StateCheck:
    """Looks for states that are not finite or all zero in every pack, and asks the device once an interval.

    read_again: reads a row of the data with every check there is, and raises when it is damaged. It decides,
    because a norm may also have overflowed, and it names the row and the layer.
    """

    def __init__(self, read_again: Callable[[int], object]) -> None:
        self._read_again = read_again
        self._sound: list[Tensor] = []
        self._rows: list[tuple[int, ...]] = []

    def add(self, batch: Batch) -> None:
        """Queue the look at one pack with its states in bf16 or fp32. Does not wait for the device."""
        self._sound.append(states_are_sound(batch))
        self._rows.append(tuple(batch["row_index"].tolist()))

    def finish(self) -> None:
        """Wait for the device. Raises IntegrityError for a damaged row of the packs since the last call."""
        if not self._sound:
            return
        sound, rows = torch.stack(self._sound).tolist(), self._rows
        self._sound, self._rows = [], []
        for good, pack in zip(sound, rows, strict=True):
            if not good:
                self._examine(pack)

    def _examine(self, pack: Sequence[int]) -> None:
        for row in pack:
            if row >= 0:  # -1 only keeps a rank busy
                self._read_again(row)


def states_are_sound(batch: Batch) -> Tensor:
    """Whether no state of a pack's rows looks NaN, infinite or all zero: a bool on the pack's device.

    A last state that the store does not keep is zero, and nothing reads it.
    """
    hidden_size = batch["verifier_last_hidden_states"].shape[-1]
    padding = batch["document_ids"][0] < 0  # shape: [S]
    sound = torch.ones((), dtype=torch.bool, device=padding.device)
    # autocast would copy all states to fp32 first
    with torch.no_grad(), torch.autocast(padding.device.type, enabled=False):
        for name in STATES:
            slots = batch[name][0].unflatten(-1, (-1, hidden_size))  # shape: [S, n, hidden_size]
            norms = torch.linalg.vector_norm(slots, dim=-1)
            good = ((norms > 0) & torch.isfinite(norms)).all(dim=-1)  # shape: [S]
            left_out = ~batch[LAST_KEPT][0] if name == STATES[1] and LAST_KEPT in batch else padding
            sound &= (good | left_out).all()
    return sound
