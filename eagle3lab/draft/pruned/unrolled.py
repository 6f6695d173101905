"""The draft's layers over the TTT steps of one pack: all of its context at step 0, afterwards its rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import elementwise as e
from .attention import Attention, dense_attention, flex_attention
from .layer import Layer, Rotation
from .plan import CONTEXT, ROWS, PrunedPlan, Window
from .weights import Rows, stacked


def windows_of(model: nn.Module) -> tuple[Window, ...]:
    """The sliding window of every layer of the draft, None for one that sees its whole document."""
    draft: Any = model
    sliding = draft.sliding_window_indices
    return tuple(draft.sliding_window if i in sliding else None for i in range(len(draft.layers)))


class Unrolled:
    """The draft's layers over the TTT steps of one pack."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        plan: PrunedPlan,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        draft: Any = model
        self.draft, self.plan, self.dtype, self.compiled = draft, plan, dtype, compiled
        config = draft.config.transformer_layer_config
        self.eps: float = config.rms_norm_eps
        self.layers = [
            Layer(layer, first=i == 0, dtype=dtype, compiled=compiled) for i, layer in enumerate(draft.layers)
        ]
        self.ids = batch["input_ids"][0]
        self.positions = batch["position_ids"]
        self.attention = _attentions(draft, batch, plan, self.layers[0].scale, compiled)
        self.state = self._first_state(batch["hidden_states"][0].index_select(0, plan.context))
        self.entered: list[Tensor] = []  # the rows' next input and residual, from the step before
        self.ahead = Rows(self._embedded(plan.ahead), self.layers[0].qkv_embedding, compiled=compiled)

    def step(self, k: int) -> Tensor:
        """The normed last states of the rows at step k, fp32. shape: [R, H]"""
        total, update = self._first_step() if k == 0 else self._later_step(k)
        weight, first = self.draft.norm.weight, self.layers[0]
        if k == self.plan.ttt_steps - 1:
            return e.kernel(e.last_norm, self.compiled)(total, update, weight, self.eps)[1]
        function = e.kernel(e.last_norm_and_next_input, self.compiled)
        feed_norm = bool(self.draft.config.norm_output)
        normed, *self.entered = function(
            total,
            update,
            weight,
            first.input_weight,
            self.eps,
            feed_norm,
            first.normed_residual,
            self.dtype,
        )
        return normed

    def _first_state(self, states: Tensor) -> Tensor:
        """What the first projection makes of the aux states. shape: [C, n_aux * H] -> [C, H]"""
        draft = self.draft
        if draft.input_norm is not None:
            states = e.kernel(e.norm, self.compiled)(states, draft.input_norm.weight, self.eps, self.dtype)
        if draft.fc_norm is not None:
            weights = [norm.weight for norm in draft.fc_norm]
            states = e.kernel(e.norm_parts, self.compiled)(states, weights, self.eps, self.dtype)
        return stacked([draft.fc.weight], self.dtype)(states.to(self.dtype))

    def _first_step(self) -> tuple[Tensor, Tensor]:
        """Step 0: every layer's keys for the whole context, and the last layer's rows."""
        plan, rotation = self.plan, self._rotation(0, self.plan.context)
        embedded = self._embedded(plan.context)
        pending: tuple[Tensor, Tensor] | None = None
        for i, layer in enumerate(self.layers):
            if i < len(self.layers) - 1:
                if pending is None:
                    x, residual = layer.enter(self.state)
                    extra = layer.qkv_embedding(embedded)
                else:
                    residual, x = self._next_input(layer, *pending)
                    extra = None
                q, *layer.keys = layer.queries_keys_values(x, extra, rotation)
                pending = layer.rest(residual, layer.attended(q, self.attention[CONTEXT][i]))
                continue
            if pending is None:
                keys_in = layer.enter_keys(self.state)
                extra = layer.qkv_embedding(embedded, layer.kv_part)
                x, residual = layer.enter(self.state.index_select(0, plan.row_keys))
                extra_q = self.ahead.gather(plan.ahead_index[0], plan.ahead_places[0], layer.q_part)
            else:
                whole, keys_in = self._next_input(layer, *pending)
                residual, x = (t.index_select(0, plan.row_keys) for t in (whole, keys_in))
                extra = extra_q = None
            layer.keys = layer.keys_and_values(keys_in, extra, rotation)
            q = layer.queries(x, extra_q, self._rotation(0, plan.rows))
            pending = layer.rest(residual, layer.attended(q, self.attention[ROWS][i]))
        assert pending is not None
        return pending

    def _later_step(self, k: int) -> tuple[Tensor, Tensor]:
        """Step k > 0: the rows alone, in every layer."""
        plan, rotation = self.plan, self._rotation(k, self.plan.rows)
        pending: tuple[Tensor, Tensor] | None = None
        for i, layer in enumerate(self.layers):
            if pending is None:
                x, residual = self.entered
                extra = self.ahead.gather(plan.ahead_index[k], plan.ahead_places[k])
            else:
                residual, x = self._next_input(layer, *pending)
                extra = None
            q, keys, values = layer.queries_keys_values(x, extra, rotation)
            layer.own_keys.append(keys)
            layer.own_values.append(values)
            pending = layer.rest(residual, layer.attended(q, self.attention[ROWS][i]))
        assert pending is not None
        return pending

    def _next_input(self, layer: Layer, total: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        function = e.kernel(e.add_and_norm, self.compiled)
        return function(total, update, layer.input_weight, self.eps, self.dtype)

    def _embedded(self, positions: Tensor) -> Tensor:
        function = e.kernel(e.embedded, self.compiled)
        with torch.no_grad():
            ids = self.ids.index_select(0, positions)
            return function(self.draft.embed_tokens.weight, ids, self.eps, self.dtype)

    def _rotation(self, k: int, positions: Tensor) -> Rotation:
        """Of the pack's positions + k, as the whole pack gives it: some kinds of RoPE look at all of it."""
        probe = torch.empty(0, dtype=self.draft.norm.weight.dtype, device=positions.device)
        cos, sin = self.draft.rotary_emb(probe, self.positions + k)
        return cos[0].index_select(0, positions), sin[0].index_select(0, positions)


def _attentions(
    draft: Any, batch: Mapping[str, Tensor], plan: PrunedPlan, scale: float, compiled: bool
) -> dict[str, list[Attention]]:
    """Per set of queries, the attention of every layer; layers with the same window share it."""
    windows = windows_of(draft)
    made: dict[tuple[str, Window], Attention] = {}
    for name, positions in ((ROWS, plan.rows), (CONTEXT, plan.context)):
        for window in set(windows if len(windows) > 1 or name == ROWS else ()):
            if plan.blocks:
                made[name, window] = flex_attention(plan.blocks[name, window], scale, compiled)
                continue
            groups = plan.groups[name]
            documents = batch["document_ids"][0] if len(groups) == 1 else None
            made[name, window] = dense_attention(groups, positions, plan.context, window, scale, documents)
    return {name: [made[name, w] for w in windows if (name, w) in made] for name in (ROWS, CONTEXT)}
