"""Self-test with an engine's own second capture: for verifiers too large to be loaded twice, and beside it.

The hooks share nothing with the capture they are held against but the engine's forward pass. Logits come
from the state after the engine's own final norm, so that our norm is judged too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.engines.base import Engine, SecondOpinion, check_states
from eagle3lab.extract.alignment import Tolerance, relative_errors
from eagle3lab.extract.reference import Reference
from eagle3lab.verifier.checkpoint import tensor_index
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights

_PACKED = {"I32": 8, "U8": 2}  # 4-bit values in an element: compressed-tensors' and MXFP4's
ROOM = 1.2  # free bytes per byte of weights that a second load may need


def reference_fits(path: Path, dtype: torch.dtype, device: str) -> bool:
    """Whether transformers can load the verifier beside everything else: unquantised, and within free memory."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config or "quantization_config" in config.get("text_config", {}):
        return False
    return forward_fits(path, dtype, device)


def forward_fits(path: Path, dtype: torch.dtype, device: str) -> bool:
    """Whether the verifier's weights, unpacked where they are quantised, have room in what is free."""
    return weight_bytes(path, dtype) * ROOM <= free_bytes(device)


def weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes of all weights in `dtype`, from the headers of the checkpoint's files; packed ones count unpacked."""
    tensors = tensor_index(path).values()
    return sum(math.prod(t.shape) * _PACKED.get(t.dtype, 1) for t in tensors) * dtype.itemsize


def free_bytes(device: str) -> int:
    """Free memory of the device, or of the machine."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def engine_references(
    engine: SecondOpinion, rows: Sequence[Sequence[int]], facts: VerifierFacts, edge: EdgeWeights
) -> list[Reference]:
    """What the hooks saw, in the form of `reference_forward`. `edge` needs embedding and head."""
    if edge.head is None or edge.embedding is None:
        raise ValueError("edge weights without head or embedding")
    references = []
    for recording in engine.record(rows, range(1, facts.num_layers)):
        hidden = [edge.embedding[recording.token_ids].float()]
        hidden += [recording.layers[k].float() for k in range(1, facts.num_layers)]
        post_norm = recording.post_norm.float()
        references.append(
            Reference(
                tuple(recording.token_ids.tolist()),
                (*hidden, post_norm),
                recording.pre_norm.float(),
                post_norm @ edge.head.float().T,
            )
        )
    return references


def compare_captures(
    engine: Engine,
    rows: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    facts: VerifierFacts,
    tolerance: Tolerance,
) -> dict[str, float]:
    """Largest relative error of `capture` against the engine's second opinion, by layer; the last is "last".

    Raises:
        IntegrityError: a layer differs by more than the tolerance, at its quantile of the tokens.
    """
    if not isinstance(engine, SecondOpinion):
        return {}
    errors: dict[str, list[torch.Tensor]] = {}
    recordings = engine.record(rows, layer_ids)
    for states, recording, row in zip(engine.capture(rows, layer_ids), recordings, rows, strict=True):
        check_states(states, row, len(layer_ids), facts.hidden_size)
        slots = dict(zip(map(str, layer_ids), states.aux.split(facts.hidden_size, dim=-1), strict=True))
        wanted = {str(k): recording.layers[k] for k in layer_ids} | {"last": recording.pre_norm}
        for name, got in (slots | {"last": states.last}).items():
            errors.setdefault(name, []).append(relative_errors(got.float(), wanted[name].float()))
    joined = {name: torch.cat(parts) for name, parts in errors.items()}
    wrong = {
        name: f"{float(values.quantile(tolerance.quantile)):.1e}"
        for name, values in joined.items()
        if not float(values.quantile(tolerance.quantile)) <= tolerance.state_error
    }
    if wrong:
        raise IntegrityError(
            Problem(
                "the engine's two captures disagree on layers",
                wrong,
                f"relative errors <= {tolerance.state_error}",
                "extract.backend=hf, or another release of the engine; nothing was written",
            )
        )
    return {name: float(values.max()) for name, values in joined.items()}
