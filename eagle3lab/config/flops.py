"""The floating-point work that a training step needs, for both ways to compute it. No torch, no device.

Needed, not executed: padding, buckets and recomputation count nothing, so a share of the device's peak made
from it cannot be raised by wasting work. Only matrix products count: norms, activations and losses do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .plan_sizes import widths_of
from .schema import DraftConfig, Shapes, TrainingStep


@dataclass(frozen=True)
class StepWork:
    """What rows ask of a training step. Tuples have one entry per TTT step k.

    A position is needed at step k when its guess of step k or of a later one is in the loss: only then are its
    queries, its attention and its MLP of step k. It is context when a needed one sees it: only then are its
    step-0 keys. Pairs are of a query and the step-0 keys it sees.
    """

    tokens: int  # all positions
    pairs: int  # of all positions
    context: int  # positions that needed ones see, themselves included
    context_pairs: int  # of those positions
    needed: tuple[int, ...]  # positions needed at step k
    needed_pairs: tuple[int, ...]  # of the positions needed at step k
    losses: tuple[int, ...]  # guesses of step k in the loss

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.context + other.context,
            self.context_pairs + other.context_pairs,
            tuple(a + b for a, b in zip(self.needed, other.needed, strict=True)),
            tuple(a + b for a, b in zip(self.needed_pairs, other.needed_pairs, strict=True)),
            tuple(a + b for a, b in zip(self.losses, other.losses, strict=True)),
        )

    @classmethod
    def of_answer(
        cls, length: int, supervised: int, ttt_steps: int, reach: int | None = None, window: int | None = None
    ) -> StepWork:
        """One row of `length` tokens, the last `supervised` of them in the loss. See `reach_of`."""

        def seen(positions: range) -> int:
            return sum(min(p + 1, window or length) for p in positions)

        steps = range(ttt_steps)
        # the guess of step k from start j is for position j + k: the starts of later steps lie further left
        first = max(length - supervised - (ttt_steps - 1), 0) if supervised else length
        context = range(max(first - reach, 0) if reach is not None and supervised else 0, length)
        context = context if supervised else range(0)
        needed = [range(first, max(length - k, first)) for k in steps]
        losses = [max(min(supervised, length - k), 0) for k in steps]
        return cls(
            length,
            seen(range(length)),
            len(context),
            seen(context),
            tuple(map(len, needed)),
            tuple(map(seen, needed)),
            tuple(losses),
        )


def reach_of(draft: DraftConfig) -> int | None:
    """How far back a position sees through all layers; None: to the start of its row."""
    return None if draft.sliding_window is None else draft.num_layers * (draft.sliding_window - 1)


def needed_flops(draft: DraftConfig, shapes: Shapes, num_aux: int, work: StepWork, *, pruned: bool) -> float:
    """FLOPs of forward and backward that `work` needs from the pruned or the unpruned training step.

    With h the hidden size, q and kv the widths of all query and key heads, f the MLP's and V the draft
    vocabulary; n_k, p_k, l_k the needed positions, their pairs and the losses of step k, c and P the context and
    its pairs:

        fusion of the aux states    4 n_aux h^2 c, or 6 behind a trained norm
        a layer's matrices          L = d q + 2 d kv + q h + 3 h f, with d = 2h in the first layer, else h
        step 0, lower layers        6 L c + 12 q P
        step 0, last layer          6 (2 d kv) c + 6 (L - 2 d kv) n_0 + 12 q p_0
        step k > 0, every layer     6 L n_k + 12 q (p_k + k n_k)
        draft head                  4 h V (l_0 + ... + l_(K-1)), or 6 where it is trained
        verifier head               2 h V l_0, forward alone

    A multiplication and its addition are 2; a product with trained weights costs 2 forward and 4 backward, an
    attention pair 4 q forward and 8 q backward. The unpruned step computes every position at every step: for
    it c, n_k and l_k are all positions, P and p_k all pairs.
    """
    context, context_pairs = (work.context, work.context_pairs) if pruned else (work.tokens, work.pairs)
    steps = range(len(work.needed))
    needed = work.needed if pruned else (work.tokens,) * len(steps)
    pairs = work.needed_pairs if pruned else (work.pairs,) * len(steps)
    losses = work.losses if pruned else (work.tokens,) * len(steps)
    w = widths_of(draft, shapes)
    h, ffn, q, kv, head = w.hidden, w.ffn, w.queries, w.keys, w.hidden * w.vocab

    total = (6.0 if draft.fc_norm or draft.norm_before_fc else 4.0) * num_aux * h * h * context
    for layer in range(draft.num_layers):
        width = 2 * h if layer == 0 else h
        keys = 2 * width * kv
        others = width * q + q * h + 3 * h * ffn
        last = layer == draft.num_layers - 1
        queries, seen = (needed[0], pairs[0]) if last else (context, context_pairs)
        total += 6 * (keys * context + others * queries) + 12 * q * seen
        for k in steps[1:]:
            total += 6 * (keys + others) * needed[k] + 12 * q * (pairs[k] + k * needed[k])
    return total + (6 if draft.train_head else 4) * head * sum(losses) + 2 * head * losses[0]


def flops_counter(draft: DraftConfig, shapes: Shapes, num_aux: int) -> Callable[[StepWork], float]:
    """`needed_flops` of the step that this draft is trained with."""
    pruned = draft.step is TrainingStep.pruned
    return partial(needed_flops, draft, shapes, num_aux, pruned=pruned)


def flops_per_token(
    draft: DraftConfig,
    shapes: Shapes,
    num_aux: int,
    doc_len: int = 1024,
    *,
    supervised_share: float = 1.0,
) -> float:
    """Of the draft's step, per token of rows of `doc_len` tokens whose last `supervised_share` is in the loss.

    At least one token of a row is taken to be: a share that rounds to none would need no work, and no time.
    """
    supervised = max(1, round(doc_len * supervised_share))
    work = StepWork.of_answer(doc_len, supervised, draft.ttt_steps, reach_of(draft), draft.sliding_window)
    return flops_counter(draft, shapes, num_aux)(work) / doc_len
