"""The pruned TTT forward: `ttt_forward`'s loss and gradients, computed only where a loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.draft.ttt import TTTOutput

from .heads import TARGET_BYTES, Head, LossAndGradient, StepLoss, Targets, step_loss
from .plan import ROW_BUCKET, PrunedPlan, plan_pack
from .unrolled import Unrolled, windows_of
from .weights import stacked


def check_prunable(model: nn.Module) -> None:
    """Raise UserError for a draft whose layers this forward does not compute as speculators does."""
    draft: Any = model
    config = draft.config.transformer_layer_config
    problems = {
        "attention_dropout": (getattr(config, "attention_dropout", 0.0), 0.0),
        "hidden_act": (config.hidden_act, "silu"),
    }
    for name, (value, expected) in problems.items():
        if value != expected:
            raise UserError(
                Problem(
                    f"the pruned step does not know a draft layer's {name}",
                    value,
                    str(expected),
                    "draft.step=reference",
                )
            )


def uses_flex(model: nn.Module) -> bool:
    """Whether the draft was built for FlexAttention."""
    draft: Any = model
    return bool(draft.config.transformer_layer_config._attn_implementation == "simple_flex_attention")


def plan_batch(
    model: nn.Module, batch: Mapping[str, Tensor], ttt_steps: int, *, cuda: bool | None = None
) -> PrunedPlan:
    """The plan of a batch, on the CPU, for a model on its device. A batch on CUDA is waited for."""
    documents = batch["document_ids"]
    on_cuda = documents.is_cuda if cuda is None else cuda
    return plan_pack(
        documents.cpu(),
        batch["loss_mask"].cpu(),
        ttt_steps,
        windows_of(model),
        bucket=ROW_BUCKET if on_cuda else 1,
        flex=on_cuda and uses_flex(model),
    )


def pruned_forward(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    ttt_steps: int,
    loss: LossAndGradient,
    *,
    token_weights: Tensor | None = None,
    plan: PrunedPlan | None = None,
    compiled: bool = True,
    max_target_bytes: int = TARGET_BYTES,
) -> TTTOutput:
    """Unroll the draft K steps over the positions of one pack that carry loss.

    model: an `Eagle3DraftModel`; its parameters are used, its forward is not. batch, token_weights and the
    result: as of `ttt_forward`, but `draft_tokens` and `correct` hold 0 where nothing is supervised. plan:
    `plan_batch` of this batch, on its device; made here if not given. The compute dtype is autocast's where it
    is on. Above `max_target_bytes` of verifier logits they are made again in every step.
    """
    draft: Any = model
    device = batch["hidden_states"].device
    low = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if low else draft.fc.weight.dtype
    if plan is None:
        plan = plan_batch(model, batch, ttt_steps).to(device)
    assert plan.ttt_steps == ttt_steps, (plan.ttt_steps, ttt_steps)
    with torch.autocast(device.type, enabled=False):
        if plan.num_rows == 0:
            return _nothing(model, plan)
        unrolled = Unrolled(model, batch, plan, dtype, compiled)
        head: Head | None = None
        steps = []
        for k in range(ttt_steps):
            states = unrolled.step(k)
            if head is None:  # where it is first used, as the layers' weights
                head = _head(model, batch, plan, loss, dtype, compiled, max_target_bytes)
            counted = plan.counted[k]
            weights = counted.to(torch.float32)
            if token_weights is not None:
                weights = torch.where(counted, token_weights[k].index_select(0, plan.rows), 0.0)
            steps.append(step_loss(head, states, plan.target_index[k], counted, weights))
    return _output(steps, plan)


def _head(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    plan: PrunedPlan,
    loss: LossAndGradient,
    dtype: torch.dtype,
    compiled: bool,
    max_target_bytes: int,
) -> Head:
    draft: Any = model
    eps = draft.config.transformer_layer_config.rms_norm_eps
    with torch.no_grad():
        states = batch["verifier_last_hidden_states"][0].index_select(0, plan.targets)
        verifier_head = draft.verifier_lm_head.weight.detach().to(dtype)
        targets = Targets(
            states,
            draft.verifier_norm.weight,
            eps,
            verifier_head,
            compiled=compiled,
            max_bytes=max_target_bytes,
        )
    if draft.lm_head.weight.requires_grad and torch.is_grad_enabled():
        weight = stacked([draft.lm_head.weight], dtype)
        return Head(weight.matrix.value, weight, targets, loss, compiled)
    return Head(draft.lm_head.weight.detach().to(dtype), None, targets, loss, compiled)


def _output(steps: list[StepLoss], plan: PrunedPlan) -> TTTOutput:
    n, rows = plan.num_rows, plan.rows[: plan.num_rows]
    guesses = torch.zeros(plan.supervised.shape, dtype=torch.int64, device=rows.device)
    guesses[:, rows] = torch.stack([s.guesses[:n] for s in steps])
    correct = torch.zeros_like(plan.supervised)
    correct[:, rows] = torch.stack([s.correct[:n] for s in steps]) & plan.counted[:, :n]
    return TTTOutput(
        torch.stack([s.weighted for s in steps]),
        torch.stack([s.plain for s in steps]),
        plan.supervised.sum(dim=1),
        guesses,
        correct,
        plan.supervised,
    )


def _nothing(model: nn.Module, plan: PrunedPlan) -> TTTOutput:
    """A pack without supervision: loss 0 with a gradient of 0 for every weight, as all ranks must have one."""
    zero = torch.zeros((), device=plan.supervised.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            zero = zero + 0.0 * parameter.flatten()[0]
    sums = zero.expand(plan.ttt_steps)
    empty = torch.zeros(plan.supervised.shape, dtype=torch.int64, device=zero.device)
    return TTTOutput(
        sums,
        sums.detach(),
        plan.supervised.sum(dim=1),
        empty,
        torch.zeros_like(plan.supervised),
        plan.supervised,
    )
