"""One sequence being decoded by the verifier: a KV cache that can be fed, read and taken back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass(frozen=True)
class SessionStep:
    """What one forward pass over n new tokens gave."""

    logits: Tensor  # shape: [num_logits, vocab_size], of the last num_logits tokens
    aux: Tensor | None  # shape: [n, n_aux * hidden_size]
    last: Tensor | None  # shape: [n, hidden_size], before the final norm


class VerifierSession:
    """Incremental forward passes of one sequence.

    Greedy decoding feeds one token at a time; verification of k drafted tokens feeds 1 + k and then
    takes back those that were not accepted with `crop`.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self._model = model
        self._layers = layers
        self._layer_ids = tuple(layer_ids)
        self._cache = DynamicCache()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.length = 0

    def forward(
        self, tokens: Sequence[int], *, num_logits: int | None = None, states: bool = True
    ) -> SessionStep:
        """Feed `tokens` after those already in the cache; `num_logits` defaults to all of them."""
        num_logits = len(tokens) if num_logits is None else num_logits
        if not 1 <= num_logits <= len(tokens):
            raise ValueError(f"num_logits {num_logits} of {len(tokens)} tokens")
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self._model.device)
        wanted = sorted({*self._layer_ids, len(self._layers)}) if states else []
        extra = {"logits_to_keep": num_logits} if self._keeps_logits else {}
        with torch.inference_mode(), record_layer_outputs(self._layers, wanted) as recorded:
            logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **extra).logits
        self.length += len(tokens)
        # outside of inference mode, so that copies are ordinary tensors
        aux = (
            torch.cat([recorded[k][0] for k in self._layer_ids], dim=-1)
            if states and self._layer_ids
            else None
        )
        last = recorded[len(self._layers)][0].clone() if states else None
        return SessionStep(logits[0, -num_logits:].clone(), aux, last)

    def crop(self, length: int) -> None:
        """Take back every token after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop to {length} of {self.length} tokens")
        if length == 0:
            self._cache = DynamicCache()
        else:
            self._cache.crop(length - self.length)
        self.length = length


@contextmanager
def record_layer_outputs(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Fill a dictionary {layer id k: copy of the output of decoder layer k counted from 1} during a forward.

    The copy is made when the layer returns: a later layer that works in place cannot change it.
    Raises RuntimeError at the end if a layer did not run exactly once.
    """
    recorded: dict[int, Tensor] = {}
    calls = dict.fromkeys(layer_ids, 0)

    def hook_of(layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            calls[layer_id] += 1
            recorded[layer_id] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    handles = [layers[layer_id - 1].register_forward_hook(hook_of(layer_id)) for layer_id in calls]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
    wrong = {layer_id: count for layer_id, count in calls.items() if count != 1}
    if wrong:
        raise RuntimeError(f"decoder layers that did not run exactly once in this forward: {wrong}")
