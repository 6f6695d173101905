"""Attention of some rows over step-0 keys, with the log-sum-exp that later keys are merged by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .block_lists import BLOCK, BlockLists
from .elementwise import allow_shapes
from .plan import Group, Window

# Queries `[n, N, d]`, keys and values `[n_kv, C, d]` -> out `[n, N, d]`, log-sum-exp `[n, N]`.
Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def dense_attention(
    groups: Sequence[Group],
    query_position: Tensor,
    key_position: Tensor,
    window: Window,
    scale: float,
    document_ids: Tensor | None = None,
) -> Attention:
    """One dense product per document. Padding sees nothing: its output is 0 and its log-sum-exp -inf.

    query_position, key_position: `[N]`, `[C]`. document_ids: `[S]`, needed where a group holds several.
    """
    masks = []
    for g in groups:
        q, k = query_position[g.query_start : g.query_end, None], key_position[None, g.key_start : g.key_end]
        mask = k <= q
        if window is not None:
            mask &= k > q - window
        if document_ids is not None:
            mask &= document_ids[k] == document_ids[q]
        masks.append(mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        num_kv, size = k.shape[0], k.shape[2]
        outs, sums, end = [], [], 0
        for g, mask in zip(groups, masks, strict=True):
            assert g.query_start == end
            end, num = g.query_end, g.query_end - g.query_start
            # shape: [n_kv, n / n_kv * N, d]
            part = q[:, g.query_start : g.query_end].reshape(num_kv, -1, size)
            scores = (part @ k[:, g.key_start : g.key_end].transpose(1, 2)).mul(scale)
            scores = scores.view(num_kv, -1, num, mask.shape[1]).masked_fill(~mask, float("-inf"))
            lse = scores.logsumexp(dim=-1, keepdim=True)
            shares = (scores - lse).exp().view(num_kv, -1, mask.shape[1])
            outs.append((shares @ v[:, g.key_start : g.key_end]).view(-1, num, size))
            sums.append(lse.view(-1, num))
        padding = q.shape[1] - end
        out, lse = torch.cat(outs, dim=1), torch.cat(sums, dim=1)
        if padding:
            out, lse = pad(out, (0, 0, 0, padding)), pad(lse, (0, padding), value=float("-inf"))
        return out, lse

    return attend


def flex_attention(
    lists: BlockLists, scale: float, compiled: bool, kernel_options: dict[str, Any] | None = None
) -> Attention:
    """FlexAttention over the listed blocks; lengths are filled up to the lists' own."""
    block_mask = _block_mask(lists)
    num_queries, num_keys = lists.query_position.numel(), lists.key_position.numel()
    function = partial(_flex(compiled), kernel_options=kernel_options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        num = q.shape[1]
        q = pad(q, (0, 0, 0, num_queries - num)) if num < num_queries else q
        if k.shape[1] < num_keys:
            k, v = (pad(t, (0, 0, 0, num_keys - t.shape[1])) for t in (k, v))
        out, lse = function(q[None], k[None], v[None], block_mask, scale)
        return out[0, :, :num], lse[0, :, :num]

    return attend


def _block_mask(lists: BlockLists) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    query_position, query_document = lists.query_position, lists.query_document
    key_position, key_document = lists.key_position, lists.key_document
    window = lists.window

    def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (query_document[q] == key_document[k]) & (key_position[k] <= query_position[q])

    def seen_in_window(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = query_position[q] - key_position[k]
        return (query_document[q] == key_document[k]) & (distance >= 0) & (distance < window)

    return BlockMask(
        seq_lengths=(query_position.numel(), key_position.numel()),
        kv_num_blocks=lists.num_partial,
        kv_indices=lists.partial,
        full_kv_num_blocks=lists.num_full,
        full_kv_indices=lists.full,
        q_num_blocks=lists.query_num_partial,
        q_indices=lists.query_partial,
        full_q_num_blocks=lists.query_num_full,
        full_q_indices=lists.query_full,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=seen if window is None else seen_in_window,
    )


@functools.cache
def _flex(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    from torch.nn.attention import flex_attention as flex

    request = getattr(flex, "AuxRequest", None)  # from torch 2.9 on; before, and until 2.10, return_lse
    wanted: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Any,
        scale: float,
        kernel_options: dict[str, Any] | None,
    ) -> tuple[Tensor, Tensor]:
        grouped = q.shape[1] != k.shape[1]
        out, extra = flex.flex_attention(
            q,
            k,
            v,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=grouped,
            kernel_options=kernel_options,
            **wanted,
        )
        return out, extra if request is None else extra.lse

    if not compiled:
        return call
    allow_shapes()
    return torch.compile(call, dynamic=False)
