"""Which packs make up which optimizer update, for the whole run, before it starts.

Everything that depends on the position in the run is read from here and nowhere else: the packs of a rank,
the supervised totals a loss is divided by, the learning rate's horizon, the tokens seen, the place to
resume. The plan is the same on every rank and for every number of loader workers.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.data.packing import Unweighted

EPOCHS_KEPT = 3  # the one being trained, the one being prefetched, one for look-ups


@dataclass(frozen=True)
class PlannedUpdate:
    """One optimizer step over all ranks.

    `packs` are in global order: micro-batch m of rank r is `packs[m * num_replicas + r]`. Where the last round
    of an epoch has fewer packs than ranks, the other ranks get a row without weight, so that the result is the
    same for any number of ranks and nothing is left out.
    """

    index: int  # over the whole run, from 0
    epoch: int
    in_epoch: int  # index within its epoch, from 0
    num_replicas: int
    packs: tuple[tuple[int, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Packs of each rank; the last update of an epoch may have fewer than the others."""
        return -(-len(self.packs) // self.num_replicas)

    def place(self, micro_batch: int, rank: int) -> int:
        """The number of a rank's pack among `packs`; at their end and beyond are those without weight."""
        return micro_batch * self.num_replicas + rank

    def pack(self, micro_batch: int, rank: int) -> tuple[int, ...]:
        place = self.place(micro_batch, rank)
        return self.packs[place] if place < len(self.packs) else (Unweighted(self.packs[0][0]),)

    def row_index(self, micro_batch: int, rank: int) -> tuple[int, ...]:
        """What a batch of `pack(micro_batch, rank)` says of its rows: -1 for one without weight."""
        return tuple(-1 if isinstance(row, Unweighted) else row for row in self.pack(micro_batch, rank))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for pack in self.packs for row in pack)


def cut_updates(packs: Sequence[Sequence[int]], size: int) -> list[list[tuple[int, ...]]]:
    """Cut an epoch's packs into updates of `size` packs; the last one takes what is left."""
    return [[tuple(pack) for pack in packs[i : i + size]] for i in range(0, len(packs), size)]


class RunPlan:
    """Every update of a run.

    `packs_of_epoch(e)` gives the global packs (lists of row indices) of epoch e. The run ends with the first
    budget reached; a token budget counts rows' real tokens and ends with the update that reaches it.
    Raises `UserError` when no budget is given or when there is no update to make.
    """

    def __init__(
        self,
        packs_of_epoch: Callable[[int], Sequence[Sequence[int]]],
        lengths: Sequence[int],
        *,
        num_replicas: int,
        micro_batches: int,
        max_epochs: int | None = None,
        max_updates: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_epochs is None and max_updates is None and max_tokens is None:
            raise UserError(
                Problem(
                    "nothing ends the run",
                    expected="train.max_epochs, train.max_updates or train.max_tokens",
                    fix="train.max_epochs=1",
                )
            )
        self.num_replicas = num_replicas
        self.micro_batches = micro_batches
        self.num_rows = len(lengths)
        self.rows_tokens = sum(lengths)  # of one pass over all rows
        self._packs_of_epoch = packs_of_epoch
        self._cache: OrderedDict[int, list[list[tuple[int, ...]]]] = OrderedDict()
        self._tokens = [0]  # _tokens[n]: real tokens of the first n updates
        self._rows = [0]  # _rows[n]: rows of the first n updates, a row counted once per epoch
        self._rank_packs = [0]  # _rank_packs[n]: packs that every rank gets in the first n updates
        self._first_update: list[int] = []  # of each epoch
        self._epoch_sizes: list[int] = []  # updates of each whole epoch, budgets aside
        self.order_digest = ""  # of the first epoch's packs: another store, order or pack length shows here
        self._walk(lengths, max_epochs, max_updates, max_tokens)

    def _walk(
        self, lengths: Sequence[int], max_epochs: int | None, max_updates: int | None, max_tokens: int | None
    ) -> None:
        epoch = 0
        while max_epochs is None or epoch < max_epochs:
            updates = self._updates_of(epoch)
            if epoch == 0 and sum(map(len, updates)) < self.num_replicas:
                break
            self._first_update.append(self.num_updates)
            self._epoch_sizes.append(len(updates))
            for packs in updates:
                self._tokens.append(self._tokens[-1] + sum(lengths[row] for pack in packs for row in pack))
                self._rows.append(self._rows[-1] + sum(map(len, packs)))
                self._rank_packs.append(self._rank_packs[-1] + -(-len(packs) // self.num_replicas))
                if self.num_updates == max_updates or (
                    max_tokens is not None and self._tokens[-1] >= max_tokens
                ):
                    return
            epoch += 1
        if self.num_updates == 0:
            num_packs = len(self._packs_of_epoch(0)) if max_epochs != 0 else 0
            raise UserError(
                Problem(
                    "no update to make: the training rows fill fewer packs than there are devices",
                    f"{self.num_rows} rows in {num_packs} packs for {self.num_replicas} devices",
                    "at least one pack for every device",
                    "hardware.num_devices=1, a smaller train.seq_len, or more conversations in the store",
                )
            )

    def _updates_of(self, epoch: int) -> list[list[tuple[int, ...]]]:
        if epoch not in self._cache:
            packs = self._packs_of_epoch(epoch)
            if epoch == 0:
                order = json.dumps([list(pack) for pack in packs])
                self.order_digest = hashlib.sha256(order.encode()).hexdigest()[:16]
            self._cache[epoch] = cut_updates(packs, self.num_replicas * self.micro_batches)
            while len(self._cache) > EPOCHS_KEPT:
                self._cache.popitem(last=False)
        self._cache.move_to_end(epoch)
        return self._cache[epoch]

    @property
    def num_updates(self) -> int:
        return len(self._tokens) - 1

    @property
    def num_epochs(self) -> int:
        """Epochs begun."""
        return len(self._first_update)

    @property
    def num_tokens(self) -> int:
        """Real (not padding) tokens of the whole run, all ranks."""
        return self._tokens[-1]

    def tokens_after(self, num_updates: int) -> int:
        """Real tokens of the first `num_updates` updates, all ranks."""
        return self._tokens[num_updates]

    def rows_after(self, num_updates: int) -> int:
        """Rows of the first `num_updates` updates, all ranks; a row counts once per epoch."""
        return self._rows[num_updates]

    def updates_for_tokens(self, num_tokens: int) -> int:
        """How many updates see at least `num_tokens` tokens; `num_updates` when the run has fewer tokens."""
        return min(bisect_left(self._tokens, num_tokens), self.num_updates)

    def locate(self, update: int) -> tuple[int, int]:
        """Epoch and index within it. `num_updates` itself is located too: where a longer run would go on."""
        epoch = bisect_right(self._first_update, update) - 1
        in_epoch = update - self._first_update[epoch]
        if in_epoch >= self._epoch_sizes[epoch]:
            return epoch + 1, in_epoch - self._epoch_sizes[epoch]
        return epoch, in_epoch

    def update(self, index: int) -> PlannedUpdate:
        assert 0 <= index < self.num_updates, f"update {index} of {self.num_updates}"
        epoch, in_epoch = self.locate(index)
        return PlannedUpdate(
            index, epoch, in_epoch, self.num_replicas, tuple(self._updates_of(epoch)[in_epoch])
        )

    def ends_epoch(self, index: int) -> bool:
        """Whether update `index` is the last of its epoch."""
        epoch, in_epoch = self.locate(index)
        return in_epoch == self._epoch_sizes[epoch] - 1

    def find(self, epoch: int, in_epoch: int) -> int:
        """The update at this place, the inverse of `locate`; `num_updates` and more are beyond the end."""
        if epoch < self.num_epochs:
            return self._first_update[epoch] + in_epoch
        return self.num_updates + in_epoch

    def num_packs_of_rank(self, start: int = 0) -> int:
        """Packs that every rank gets from update `start` to the end."""
        return self._rank_packs[-1] - self._rank_packs[start]

    def packs_of_rank(self, rank: int, start: int = 0) -> Iterator[list[int]]:
        """This rank's packs in order, from update `start` to the end of the run."""
        for index in range(start, self.num_updates):
            update = self.update(index)
            for micro_batch in range(update.num_micro_batches):
                yield list(update.pack(micro_batch, rank))
