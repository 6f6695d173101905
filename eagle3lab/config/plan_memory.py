"""The device memory of a training run, part by part, counted from what the step keeps.

A step has two moments at which its memory may peak, and a plan shows the larger one:

- the backward pass begins: all activations are there, and the gradients of the last layer's MLP;
- the backward pass ends: the activations are gone, all gradients are there, and the first layer's query, key and
  value gradients a second time, because they are made from those of its two halves (embedding and state).

The pruned step has no fitted constant. Of the reference step, which torch.compile arranges, it is not known when
it peaks: the numbers of `REFERENCE_KEEPS` are fitted, once, to its peaks at two TTT lengths and two hidden sizes
(`benchmarks/results/train_step_h200.json` and `wide_h200.json`), and all its gradients are taken to be there.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan_sizes import GIB, DraftSize, Widths, widths_of
from .schema import (
    Accelerator,
    DraftConfig,
    HardwareConfig,
    HeadStart,
    OptimConfig,
    OptimKind,
    Precision,
    Shapes,
    Strategy,
    TrainerConfig,
    TrainingStep,
)

TARGET_BYTES = 1 << 31  # above it the pruned step makes target logits again for every step
WORKSPACE_GIB = 2 * 32 / 1024  # cuBLAS, 32 MiB each for the forward and the backward thread on Hopper
# of a position and TTT step, in values of the compute dtype: multiples of the draft vocabulary, the MLP's width, the
# hidden size, the queries' width and the keys'
REFERENCE_KEEPS = (3, 4, 7, 3, 2)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one moment of a step holds beside what is always there."""

    gradients: float
    activations: float


def training_gib(
    draft: DraftConfig,
    shapes: Shapes,
    hardware: HardwareConfig,
    train: TrainerConfig,
    optim: OptimConfig | None,
    *,
    size: DraftSize,
    num_aux: int,
    devices: int,
    accumulate: int,
    supervised_share: float,
) -> dict[str, float]:
    """GiB of one device by part, at the peak of a step. `devices`: over all nodes."""
    width = 2 if hardware.precision is Precision.bf16 else 4
    whole = size.trainable * 4.0
    shards = hardware.strategy is Strategy.fsdp2
    kept = whole / devices if shards else whole
    states = 1 if optim is not None and optim.kind is OptimKind.muon else 2  # norms have two, and are few
    average = 1 if optim is not None and optim.ema_decay is not None else 0
    moments = _moments(
        draft,
        shapes,
        hardware,
        train,
        size=size,
        num_aux=num_aux,
        devices=devices,
        accumulate=accumulate,
        share=supervised_share,
        width=width,
    )
    peak = max(moments, key=lambda moment: moment.gradients + moment.activations)
    batch = train.seq_len * (num_aux + 1) * shapes.hidden_size * width
    pruned = draft.step is TrainingStep.pruned
    parts = {
        "trainable weights (fp32)": kept + (whole if shards else 0),  # gathered for the step
        "optimizer states (fp32)": kept * states,
        "averaged weights (fp32)": kept * average,
        "gradients (fp32), at the peak": peak.gradients,
        "trainable weights, as the products read them": size.trainable * width if pruned or width == 2 else 0,
        "frozen embedding and heads": _frozen(draft, shapes, size, width),
        "verifier's whole head, for validation": shapes.vocab_size * shapes.hidden_size * width,
        "activations, at the peak": peak.activations,
        "batches in flight": 2 * batch,
        "workspaces": WORKSPACE_GIB * GIB if hardware.accelerator is not Accelerator.cpu else 0,
    }
    if train.acceptance.every_updates:  # on the first device, which must hold it
        own = (size.trainable + size.frozen) * width
        verifier = shapes.num_parameters * max(width, shapes.bytes_per_parameter)
        parts["verifier and a second draft, to decode with"] = verifier + own
    return {part: num_bytes / GIB for part, num_bytes in parts.items() if num_bytes}


def _frozen(draft: DraftConfig, shapes: Shapes, size: DraftSize, width: int) -> float:
    """The pruned step holds a bf16 verifier's in bf16 and equal heads once, the reference all in fp32."""
    if draft.step is TrainingStep.reference:
        return size.frozen * 4.0
    two_heads = draft.head is HeadStart.random and not draft.train_head  # a trained one is counted as trained
    heads = (2 if two_heads else 1) * size.vocab_size
    return (shapes.vocab_size + heads) * shapes.hidden_size * float(width)


def _moments(
    draft: DraftConfig,
    shapes: Shapes,
    hardware: HardwareConfig,
    train: TrainerConfig,
    *,
    size: DraftSize,
    num_aux: int,
    devices: int,
    accumulate: int,
    share: float,
    width: int,
) -> list[StepMemory]:
    w, whole = widths_of(draft, shapes), size.trainable * 4.0
    if draft.step is TrainingStep.reference:
        widths = w.vocab, w.ffn, w.hidden, w.queries, w.keys
        kept = sum(n * v for n, v in zip(REFERENCE_KEEPS, widths, strict=True))
        return [StepMemory(whole, float(train.seq_len * draft.ttt_steps * kept * width))]
    rows = share * train.seq_len
    shards = hardware.strategy is Strategy.fsdp2
    # DDP's buckets are always there, and so is what the micro-batches of an update have added up: it comes into the
    # buckets with the last of them
    standing = whole * ((devices > 1 and not shards) + (accumulate > 1))
    targets = _targets(rows, w, width)
    made_first = 4.0 * w.hidden * (3 * w.ffn + (w.vocab if draft.train_head else 0))
    halves = 4.0 * 2 * w.hidden * (w.queries + 2 * w.keys)
    moments = [
        StepMemory(standing + made_first, _kept(draft, w, num_aux, train.seq_len, rows, width) + targets),
        StepMemory(
            max(whole, standing) + halves * (2 if standing else 1), 4.0 * w.queries * w.hidden + targets
        ),
    ]
    if shards:  # the buffer that is reduced and cut, beside the whole gradients
        moments.append(StepMemory(2 * whole, targets))
    return moments


def _targets(rows: float, w: Widths, width: int) -> float:
    """The verifier's normed states and logits at the rows; the loss holds them until its graph is gone."""
    logits = rows * w.vocab * width
    return rows * w.hidden * width + (logits if logits <= TARGET_BYTES else 0)


def _kept(draft: DraftConfig, w: Widths, num_aux: int, seq_len: int, rows: float, width: int) -> float:
    """Bytes that the pruned forward leaves for its backward pass, and what that begins with.

    rows: positions that carry loss. Of a row, in every layer of every TTT step: the inputs of attention and MLP and
    the MLP's output (3 h), its products (2 f), the queries, what attention gives by head and by row (3 q), its own
    key and value (2 kv), and the residual stream in fp32. Of a position, at step 0: the aux states, what the first
    projection makes of them, its norm and the embedding's (n_aux h + 3 h), key and value (2 kv); in layers below the
    last one all that a row has.
    """
    h = w.hidden
    in_a_layer = width * (3 * h + 2 * w.ffn + 3 * w.queries + 2 * w.keys) + 4 * h
    loss_gradient = 4 * h if draft.train_head else width * h  # or the states to make it from
    of_a_row = draft.ttt_steps * (draft.num_layers * in_a_layer + loss_gradient)
    # the gathered state, and the embedding with its projection for all steps
    once = width * (h + h + w.queries + 2 * w.keys)
    fusion = (num_aux + 3 + (num_aux if draft.fc_norm or draft.norm_before_fc else 0)) * h
    of_a_position = width * (fusion + 2 * w.keys) + (draft.num_layers - 1) * in_a_layer
    # the MLP's gated products and their gradients, and the residual's gradient
    begins = width * (4 * w.ffn + h) + 4 * h
    return rows * (of_a_row + once + begins) + seq_len * of_a_position
