"""The batch sampler: global packs, dealt to updates, micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.data.pack_plan import pack_rows, shuffled


class Unweighted(int):
    """Index of a row that only keeps a rank busy: the dataset clears its loss mask, row_index is -1."""


class PackBatchSampler(Sampler[list[int]]):
    """Yields this rank's packs of dataset indices, one pack per batch.

    Update u, micro-batch m, rank r of R with A micro-batches per update reads global pack
    u * (R * A) + m * R + r. The global packs of an epoch depend on lengths, max_len, seed and epoch alone.
    All ranks get equally many packs: with `drop_last` the fewer than R packs at the end of an epoch are
    left out (`num_left_out`), without it the missing ones are filled with `Unweighted` rows.

    lengths: exact tokens of every dataset item, after the shift. groups: of every item; rows of two groups
    never share a pack, and without shuffling the groups follow each other. Raises UserError when a row is
    longer than `max_len`, or when there are too few packs for the ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_len: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        packs_per_update_per_rank: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        groups: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < num_replicas or packs_per_update_per_rank < 1:
            raise ValueError(f"rank {rank} of {num_replicas}, {packs_per_update_per_rank} packs per update")
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        self.max_len = max_len
        self.groups = np.zeros(len(lengths), dtype=np.int64) if groups is None else np.asarray(groups)
        self.num_replicas = num_replicas
        self.rank = rank
        self.packs_per_update_per_rank = packs_per_update_per_rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start_pack = 0
        self._plans: dict[int, list[list[int]]] = {}
        self._updates: tuple[int, NDArray[np.int64]] | None = None
        _check_lengths(self.lengths, max_len)
        num_packs = len(self.plan(0))
        if drop_last and num_packs < num_replicas:
            raise UserError(
                Problem(
                    f"{len(self.lengths)} rows make {num_packs} packs of {max_len} tokens",
                    expected=f"at least one for each of the {num_replicas} ranks",
                    fix="fewer devices with hardware.num_devices=N, a smaller train.seq_len, or more data",
                )
            )

    @property
    def sampler(self) -> PackBatchSampler:
        """Itself: Lightning calls `set_epoch` on a batch sampler's `.sampler` only."""
        return self

    @property
    def packs_per_update(self) -> int:
        """Global packs of one full update, over all ranks."""
        return self.num_replicas * self.packs_per_update_per_rank

    @property
    def num_left_out(self) -> int:
        """Packs of this epoch that no rank reads."""
        return max(len(self.plan(self.epoch)) - self._num_dealt(self.epoch), 0)

    @property
    def num_updates(self) -> int:
        """Updates of this epoch; the last one may have fewer micro-batches."""
        return self.num_updates_in(self.epoch)

    def num_updates_in(self, epoch: int) -> int:
        """Updates of an epoch. Epochs may differ by a pack, so a schedule sums over its epochs."""
        return -(-self._num_dealt(epoch) // self.packs_per_update)

    def set_epoch(self, epoch: int, start_pack: int | None = None) -> None:
        """Choose the epoch's plan, and on resume how many global packs of it were already used.

        Without `start_pack` a new epoch starts at 0 and the current one keeps its start. Raises UserError
        unless `start_pack` is a whole number of updates or the end of the epoch.
        """
        if start_pack is None:
            start_pack = self.start_pack if epoch == self.epoch else 0
        dealt = self._num_dealt(epoch)
        if start_pack > dealt or (start_pack % self.packs_per_update and start_pack != dealt):
            raise UserError(
                Problem(
                    f"epoch {epoch} was left after {start_pack} packs",
                    expected=f"a multiple of {self.packs_per_update} packs per update, at most {dealt}",
                    fix="resume with as many devices x micro-batches per update as before",
                )
            )
        self.epoch, self.start_pack = epoch, start_pack

    def plan(self, epoch: int) -> list[list[int]]:
        """All packs of an epoch, in the order in which updates use them; the same on every rank."""
        key = epoch if self.shuffle else 0
        if key not in self._plans:
            count = len(self.lengths)
            order = shuffled(count, self.seed, key, 0) if self.shuffle else np.arange(count)
            packs = [
                pack
                for group in np.unique(self.groups)
                for pack in pack_rows(self.lengths, self.max_len, order[self.groups[order] == group])
            ]
            if self.shuffle:
                packs = [packs[i] for i in shuffled(len(packs), self.seed, key, 1)]
            self._plans = {kept: self._plans[kept] for kept in self._plans if kept == self.epoch}
            self._plans[key] = packs
        return self._plans[key]

    def __iter__(self) -> Iterator[list[int]]:
        plan, dealt = self.plan(self.epoch), self._num_dealt(self.epoch)
        for pack in range(self.start_pack + self.rank, dealt, self.num_replicas):
            yield list(plan[pack]) if pack < len(plan) else [Unweighted(plan[0][0])]

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch; as Lightning counts, those before `start_pack` too."""
        return self._num_dealt(self.epoch) // self.num_replicas

    def rows_of_update(self, update: int) -> list[int]:
        """Dataset indices that one update of this epoch uses, over all ranks and micro-batches."""
        if not 0 <= update < self.num_updates:
            raise IndexError(f"update {update} of {self.num_updates}")
        end = min((update + 1) * self.packs_per_update, self._num_dealt(self.epoch))
        packs = self.plan(self.epoch)[update * self.packs_per_update : end]
        return [row for pack in packs for row in pack]

    def update_of(self, row_index: int) -> int:
        """Number of the update of this epoch that uses a row. Raises KeyError for a row that none uses."""
        if self._updates is None or self._updates[0] != self.epoch:
            updates = np.full(len(self.lengths), -1, dtype=np.int64)
            for update in range(self.num_updates):
                updates[self.rows_of_update(update)] = update
            self._updates = (self.epoch, updates)
        update = int(self._updates[1][row_index]) if 0 <= row_index < len(self.lengths) else -1
        if update < 0:
            raise KeyError(f"no update of epoch {self.epoch} uses row {row_index}")
        return update

    def _num_dealt(self, epoch: int) -> int:
        """Packs that the ranks read in an epoch, the unweighted ones included; a multiple of the ranks."""
        packs = len(self.plan(epoch))
        return (
            (packs if self.drop_last else packs + self.num_replicas - 1)
            // self.num_replicas
            * self.num_replicas
        )


def _check_lengths(lengths: NDArray[np.int64], max_len: int) -> None:
    if lengths.ndim != 1 or (len(lengths) and lengths.min() < 1):
        raise ValueError("lengths must be one positive number per row")
    if not len(lengths):
        raise UserError(
            Problem("there are no rows to pack", expected="at least one", fix="more data, data.paths=[...]")
        )
    too_long = int((lengths > max_len).sum())
    if too_long:
        longest = int(lengths.max())
        raise UserError(
            Problem(
                f"{too_long} of {len(lengths)} rows do not fit into a pack of {max_len} tokens; the longest",
                value=longest,
                expected=f"at most {max_len}",
                fix=f"train.seq_len={-(-longest // 128) * 128}, or extract with data.max_len={max_len}",
            )
        )
