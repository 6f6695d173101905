"""The second opinion: plain forward hooks inside vLLM's workers. Imports no vllm; workers find it by name.

It shares nothing with vLLM's own extraction: the hooks sit on the decoder layers, see the eager forward of
one prompt at a time, and record the token ids that reached the embedding beside the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TOKEN_IDS = "token_ids"
PRE_NORM = "pre_norm"
POST_NORM = "post_norm"


def layer_key(layer_id: int) -> str:
    """Name of the state of layer id k in a recording."""
    return f"layer_{layer_id}"


def one_answer(answer: Any, is_answer: Callable[[Any], bool]) -> Any:
    """The answer of rank 0 in what a collective call returned, told by its structure and never by position.

    Releases and options of `collective_rpc` return a list with one entry per worker, of which one or all
    hold an answer, or the answer itself. `is_answer` knows a whole answer of rank 0 when it sees one, so
    that no part of an answer is ever taken for it.

    Raises:
        ValueError: not exactly one answer.
    """
    if is_answer(answer):
        return answer
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise ValueError(
            f"a worker call returned a {type(answer).__name__}, expected an answer or a list of them"
        )
    found = [entry for entry in answer if is_answer(entry)]
    if len(found) != 1:
        raise ValueError(
            f"a worker call returned {len(found)} answers of rank 0 among {len(answer)}, expected 1"
        )
    return found[0]


def rank_zero(answer: Any, tag: int) -> Mapping[str, Any]:
    """The answer of rank 0 to the call with this tag; a reply to an earlier call is an error (ValueError)."""
    ours = one_answer(answer, lambda a: isinstance(a, Mapping) and a.get("rank") == 0)
    if ours.get("tag") != tag:
        raise ValueError(f"a worker call {tag} was answered by the reply to call {ours.get('tag')}")
    return ours


class CaptureExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); called through `collective_rpc`.

    Needs an eager forward without prefix caching, and one prompt at a time.
    """

    model_runner: Any
    rank: int

    def eagle3lab_record(self, tag: int, layer_ids: Sequence[int]) -> dict[str, int]:
        """From now on record the output of decoder layers `layer_ids` (from 1), and both sides of the norm."""
        runner = self.model_runner
        decoder = find_decoder(runner.get_model() if hasattr(runner, "get_model") else runner.model)
        recorder = _Recorder()
        original = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.num_tokens = scheduler_output.total_num_scheduled_tokens
            try:
                return original(scheduler_output, *args, **kwargs)
            finally:
                recorder.num_tokens = 0

        runner.execute_model = execute_model
        recorder.undo.append(lambda: delattr(runner, "execute_model"))
        embedding = embedding_of(decoder).register_forward_pre_hook(
            lambda _module, args: recorder.add(TOKEN_IDS, args[0])
        )
        norm = decoder.norm.register_forward_hook(
            lambda _module, args, out: recorder.add_norm(args, out), prepend=True
        )
        recorder.undo += [embedding.remove, norm.remove]
        for layer_id in layer_ids:
            handle = decoder.layers[layer_id - 1].register_forward_hook(_layer_hook(recorder, layer_id))
            recorder.undo.append(handle.remove)
        self._eagle3lab_recorder = recorder
        return {"rank": int(self.rank), "tag": tag, "num_layers": len(decoder.layers)}

    def eagle3lab_save(self, tag: int, path: str) -> dict[str, int]:
        """Stop recording; rank 0 writes the recording to `path`."""
        recorder = self._eagle3lab_recorder
        for undo in recorder.undo:
            undo()
        del self._eagle3lab_recorder
        tensors = {name: torch.cat(parts) for name, parts in recorder.parts.items()}
        if self.rank == 0:
            save_file(tensors, path)
        return {"rank": int(self.rank), "tag": tag, "num_tokens": len(tensors.get(TOKEN_IDS, ()))}


class _Recorder:
    """Collects the first `num_tokens` positions of every forward: those after them are padding."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of the forward in progress; 0: a warm-up run, or none
        self.parts: dict[str, list[Tensor]] = {}
        self.undo: list[Callable[[], Any]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.num_tokens:
            if tensor.ndim > (1 if name == TOKEN_IDS else 2):  # transformers' layers: a batch of one
                tensor = tensor[0]
            part = tensor[: self.num_tokens].detach().to("cpu", copy=True)
            self.parts.setdefault(name, []).append(part.contiguous())

    def add_norm(self, args: Sequence[Any], out: Any) -> None:
        """The final norm takes (hidden, residual) and returns (normed, sum), or takes and returns one tensor."""
        if isinstance(out, tuple):
            self.add(POST_NORM, out[0])
            self.add(PRE_NORM, out[1])
        else:
            self.add(POST_NORM, out)
            self.add(PRE_NORM, args[0])


def _layer_hook(recorder: _Recorder, layer_id: int) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _args: Any, out: Any) -> None:
        # layers that defer the residual sum return (hidden, residual): the state is their sum
        tensors = [t for t in (out if isinstance(out, tuple) else (out,))[:2] if t is not None]
        recorder.add(layer_key(layer_id), sum(tensors[1:], tensors[0]))

    return hook


def find_decoder(model: Any) -> Any:
    """The module with `layers`, `norm` and an embedding, inside whatever wraps it.

    Raises AttributeError when there is none.
    """
    for module in model.modules():
        if all(hasattr(module, name) for name in ("layers", "norm")) and embedding_of(module) is not None:
            return module
    raise AttributeError(f"no decoder with layers, norm and an embedding in {type(model).__name__}")


def embedding_of(decoder: Any) -> Any:
    """The embedding under the names that decoders have for it; gpt-oss's is the second. None without one."""
    return getattr(decoder, "embed_tokens", None) or getattr(decoder, "embedding", None)
