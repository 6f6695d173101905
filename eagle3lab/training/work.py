"""The work that a pack holds, counted on the host from its masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from eagle3lab.config.flops import StepWork, reach_of
from eagle3lab.config.schema import DraftConfig
from eagle3lab.data.shift import Batch
from eagle3lab.draft.ttt import supervision_masks


def work_counter(draft: DraftConfig) -> Callable[[Batch], StepWork]:
    """`pack_work` for packs that this draft is trained on."""
    return partial(pack_work, ttt_steps=draft.ttt_steps, reach=reach_of(draft), window=draft.sliding_window)


def pack_work(batch: Batch, ttt_steps: int, reach: int | None = None, window: int | None = None) -> StepWork:
    """`StepWork` of a packed batch on the CPU: loss_mask, document_ids and position_ids [1, S] are read.

    A position sees the step-0 keys of its row up to its own, at most `window` of them; `reach`: `reach_of`.
    """
    document_ids = batch["document_ids"][0]  # shape: [S]
    real = document_ids >= 0
    masks = supervision_masks(batch["loss_mask"][0], document_ids, ttt_steps)  # shape: [K, S]
    needed = masks.flip(0).cummax(dim=0).values.flip(0)  # at this step or a later one
    places = torch.arange(len(document_ids))
    following = torch.where(needed[0], places, len(places)).flip(0).cummin(dim=0).values.flip(0)
    there = following.clamp(max=len(places) - 1)
    context = real & (following < len(places)) & (document_ids[there] == document_ids)
    if reach is not None:
        context &= following - places <= reach
    seen = batch["position_ids"][0]  # positions count from 1
    if window is not None:
        seen = seen.clamp(max=window)
    return StepWork(
        int(real.sum()),
        int(seen[real].sum()),
        int(context.sum()),
        int(seen[context].sum()),
        tuple(needed.sum(dim=1).tolist()),
        tuple(torch.where(needed, seen, 0).sum(dim=1).tolist()),
        tuple(masks.sum(dim=1).tolist()),
    )
