"""Chain drafting with a key-value cache, through the draft's own layers, one sequence at a time.

Mirrors what an engine does: verified tokens enter with the verifier's aux states (step 0) and stay in
the cache; the k-1 further steps of a proposal run on the draft's own state, and their keys are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.draft.vocabulary import DraftVocabulary


class _Cache:
    """Keys and values of every layer, in buffers that double: `update` is what attention calls."""

    def __init__(self, num_layers: int) -> None:
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append `[1, kv_heads, n, head_dim]`; returns all of that layer's keys and values so far."""
        start = self._lengths[layer_idx]
        end = start + key.shape[2]
        buffers = self._buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < end:
            capacity = max(2 * start, end, 64)
            grown = tuple(x.new_empty((*x.shape[:2], capacity, x.shape[3])) for x in (key, value))
            if buffers is not None:
                for new, old in zip(grown, buffers, strict=True):
                    new[:, :, :start] = old[:, :, :start]
            buffers = self._buffers[layer_idx] = (grown[0], grown[1])
        buffers[0][:, :, start:end] = key
        buffers[1][:, :, start:end] = value
        self._lengths[layer_idx] = end
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def crop(self, length: int) -> None:
        self._lengths = [min(length, n) for n in self._lengths]


class ChainDrafter:
    """Drafts chains, greedy or sampled, for one growing sequence.

    The pair j of a sequence is (token j + 1, aux state of token j), at position j + 1, as in training.
    Needs a model built with sdpa or eager attention; weights are used as they are, without autocast.
    A sliding window is counted from each query's own position, as an engine does.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        layer_config = self._model.config.transformer_layer_config
        self._attention = layer_config._attn_implementation
        if self._attention not in ("sdpa", "eager"):
            raise ValueError(f"chain drafting needs sdpa or eager attention, not {self._attention}")
        if self._model.rotary_emb.inv_freq.dtype != torch.float32:
            raise ValueError(
                "rotary frequencies are not fp32, as after model.to(dtype): use load_draft(..., dtype=...)"
            )
        self._window: int | None = self._model.sliding_window
        self._windowed = set(self._model.sliding_window_indices)
        vocabulary = (
            None if self._model.d2t is None else DraftVocabulary(self._model.t2d.cpu(), self._model.d2t.cpu())
        )
        self._verifier_ids = None if vocabulary is None else vocabulary.verifier_ids.tolist()
        self.reset()

    def reset(self) -> None:
        """Start another sequence."""
        self._cache = _Cache(len(self._model.layers))
        self._num_pairs = 0
        self._last: Tensor | None = None  # shape: [hidden_size], output state of the last pair

    @property
    def num_pairs(self) -> int:
        """Verified pairs in the cache."""
        return self._num_pairs

    @torch.no_grad()
    def extend(self, aux: Tensor, tokens: Tensor) -> Tensor:
        """Append verified pairs; returns their output states `[n, hidden_size]`, for `logits`.

        aux: `[n, n_aux * hidden_size]`, the verifier's states of tokens j. tokens: `[n]`, tokens j + 1.
        """
        if aux.shape[0] != tokens.shape[0] or tokens.shape[0] == 0:
            raise ValueError(f"{aux.shape[0]} states and {tokens.shape[0]} tokens do not make pairs")
        aux = aux.to(self._model.fc.weight.dtype)
        states = self._run(combine_aux(self._model, aux), tokens, self._num_pairs)
        self._num_pairs += tokens.shape[0]
        self._last = states[-1]
        return states

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Draft-vocabulary logits of output states. `[n, hidden_size]` -> `[n, draft_vocab_size]`"""
        model = self._model
        return model.lm_head(states if model.config.norm_output else model.norm(states))

    @torch.no_grad()
    def propose(self, num_tokens: int) -> list[int]:
        """The greedy chain of verifier ids that follows the last pair. Leaves the cache as it was."""
        return self.propose_with_logits(num_tokens)[0]

    @torch.no_grad()
    def propose_with_logits(self, num_tokens: int) -> tuple[list[int], Tensor]:
        """As `propose`, with the logits of every step: `[num_tokens, draft_vocab_size]`."""
        return self._chain(num_tokens, lambda logits: int(logits.argmax()))

    @torch.no_grad()
    def sample(
        self, num_tokens: int, temperature: float, generator: torch.Generator
    ) -> tuple[list[int], Tensor]:
        """As `propose`, every token drawn from the draft's own distribution; and those distributions.

        generator: on the CPU. The distributions are `[num_tokens, vocab_size]` over the verifier's vocabulary,
        zero where the draft has no word, float64 on the CPU.
        """
        drawn_from: list[Tensor] = []

        def draw(logits: Tensor) -> int:
            drawn_from.append(torch.softmax(logits.double().cpu() / temperature, dim=-1))
            return int(torch.multinomial(drawn_from[-1], 1, generator=generator))

        chain, _ = self._chain(num_tokens, draw)
        proposals = torch.stack(drawn_from)
        if self._verifier_ids is None:
            return chain, proposals
        widened = proposals.new_zeros(num_tokens, self._model.t2d.shape[0])
        widened[:, self._verifier_ids] = proposals
        return chain, widened

    def _chain(self, num_tokens: int, pick: Callable[[Tensor], int]) -> tuple[list[int], Tensor]:
        """Verifier ids that follow the last pair, and the logits that `pick` chose them from."""
        if self._last is None:
            raise ValueError("nothing to continue: extend with at least one verified pair first")
        state = self._last[None]  # shape: [1, hidden_size]
        chain: list[int] = []
        all_logits = []
        for step in range(num_tokens):
            if step:
                token = torch.tensor(chain[-1:], device=state.device)
                state = self._run(state, token, self._num_pairs + step - 1)
            logits = self.logits(state)
            draft_id = pick(logits[0])
            chain.append(draft_id if self._verifier_ids is None else self._verifier_ids[draft_id])
            all_logits.append(logits)
        self._cache.crop(self._num_pairs)
        return chain, torch.cat(all_logits)

    def _run(self, hidden: Tensor, tokens: Tensor, start: int) -> Tensor:
        """One pass of the layers. hidden: `[n, hidden_size]`; returns the fed-back state, same shape."""
        model = self._model
        num_new = tokens.shape[0]
        states = torch.cat([model.embed_tokens(tokens), hidden], dim=-1)[None]
        # shape: [1, n, 2 * hidden_size]
        positions = torch.arange(start + 1, start + 1 + num_new, device=tokens.device)[None]
        rotary = model.rotary_emb(states, positions)
        for index, layer in enumerate(model.layers):
            window = self._window if index in self._windowed else None
            states = layer(
                states,
                attention_mask=self._mask(start, num_new, window, states),
                position_ids=positions,
                past_key_values=self._cache,
                position_embeddings=rotary,
            )
        return (model.norm(states) if model.config.norm_output else states)[0]

    def _mask(self, start: int, num_new: int, window: int | None, like: Tensor) -> Tensor | None:
        """Causal mask of the new rows over all keys; None where a single row sees every key."""
        num_keys = start + num_new
        if num_new == 1 and (window is None or num_keys <= window):
            return None
        rows = torch.arange(start, num_keys, device=like.device)[:, None]
        keys = torch.arange(num_keys, device=like.device)[None]
        visible = keys <= rows
        if window is not None:
            visible &= keys > rows - window
        visible = visible[None, None]  # shape: [1, 1, n, num_keys]
        if self._attention == "sdpa":
            return visible
        return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(
            ~visible, float("-inf")
        )


def combine_aux(model: Any, aux: Tensor) -> Tensor:
    """The draft's input state from concatenated aux states: optional norm, then the first projection.

    aux: `[..., n_aux * hidden_size]`; returns `[..., hidden_size]`.
    """
    if model.input_norm is not None:
        aux = model.input_norm(aux)
    if model.fc_norm is not None:
        chunks = aux.chunk(len(model.fc_norm), dim=-1)
        aux = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    return model.fc(aux)
