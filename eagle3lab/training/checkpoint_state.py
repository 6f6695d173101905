"""What a checkpoint holds: trainable tensors (and their averages), vocabulary maps, optimizer, place in the plan.

Lightning's own loop counters are left out. The plan and the number of completed updates say everything they
would, exactly and for another number of ranks too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.config.errors import IntegrityError, Problem, UserError, raise_all
from eagle3lab.config.schema import OptimConfig, OptimKind

from .checkpoint_files import KEY, read_position
from .run_plan import RunPlan

PREFIX = "draft."
AVERAGE = "average"  # of the trained weights, by their names in the draft
FORMAT = 1
TTT_INPUT_TOKENS = "ground_truth"  # what later TTT steps are fed: the true tokens, never the draft's own


def kept_names(draft: nn.Module) -> set[str]:
    """The draft's tensors that a checkpoint holds: all but frozen parameters, which are the verifier's."""
    # under every name: two heads may be one parameter (`shrink_frozen`)
    everything = draft.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in everything if not p.requires_grad}
    return set(draft.state_dict()) - frozen


def trim(checkpoint: dict[str, Any], draft: nn.Module, plan: RunPlan, num_updates: int, seed: int) -> None:
    """Make Lightning's checkpoint ours, in place."""
    kept = {PREFIX + name for name in kept_names(draft)}
    checkpoint["state_dict"] = {name: t for name, t in checkpoint["state_dict"].items() if name in kept}
    checkpoint.pop("loops", None)
    epoch, in_epoch = plan.locate(num_updates)
    checkpoint["epoch"], checkpoint["global_step"] = epoch, num_updates
    checkpoint[KEY] = {
        "format": FORMAT,
        "num_updates": num_updates,
        "tokens": plan.tokens_after(num_updates),
        "epoch": epoch,
        "in_epoch": in_epoch,
        "num_replicas": plan.num_replicas,
        "ttt_input_tokens": TTT_INPUT_TOKENS,
        "data": _data_identity(plan, seed),
    }


def _data_identity(plan: RunPlan, seed: int) -> dict[str, int | str]:
    """What the order of rows and the make-up of an update depend on."""
    return {
        "train.seed": seed,
        "packs_per_update": plan.num_replicas * plan.micro_batches,
        "number_of_rows": plan.num_rows,
        "number_of_tokens": plan.rows_tokens,
        "order_of_rows": plan.order_digest,
    }


def check(checkpoint: dict[str, Any], draft: nn.Module, plan: RunPlan, seed: int) -> int:
    """Hold a checkpoint against this run's draft, vocabulary and plan; returns the updates completed.

    Another budget is fine: the run goes on with the new plan from the same place in the data.
    Raises `IntegrityError` for other tensors or another vocabulary, `UserError` for other data, another
    update size, or a budget that ends before that place.
    """
    state = checkpoint.get(KEY)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise IntegrityError(
            Problem("not a checkpoint of eagle3lab, or of another format", state, f"format {FORMAT}")
        )
    held = _draft_tensors(checkpoint)
    problems = _tensor_problems(held, draft)
    if problems:
        raise IntegrityError(*problems)
    identity = _data_identity(plan, seed)
    raise_all(
        [
            Problem(
                f"the checkpoint was made with another {name}",
                state["data"].get(name),
                f"{identity[name]}, as this run has it",
                _fix(name, state["data"].get(name)),
            )
            for name in identity
            if state["data"].get(name) != identity[name]
        ]
    )
    if (state["epoch"], state["in_epoch"]) > plan.locate(plan.num_updates):
        raise UserError(
            Problem(
                "the checkpoint lies beyond the end of this run: updates made until it",
                state["num_updates"],
                f"at most {plan.num_updates}, where the budget of this run ends",
                "the train.max_epochs, train.max_updates and train.max_tokens of before, or larger ones",
            )
        )
    return plan.find(state["epoch"], state["in_epoch"])


def add_optimizer(checkpoint: dict[str, Any], optim: OptimConfig, average: dict[str, Tensor] | None) -> None:
    """Say which optimizer made a trimmed checkpoint, and add the averaged weights of a run that has them."""
    checkpoint[KEY]["optim.kind"] = optim.kind.value
    if average is not None:
        checkpoint[AVERAGE] = average


def check_optimizer(checkpoint: dict[str, Any], optim: OptimConfig) -> dict[str, Tensor] | None:
    """The averaged weights of a checkpoint; raises `UserError` when its states are no use to this optimizer."""
    kind = checkpoint[KEY].get("optim.kind", OptimKind.adamw.value)
    average = checkpoint.get(AVERAGE)
    problems = []
    if kind != optim.kind.value:
        problems.append(
            Problem(
                "the checkpoint was made with another optim.kind",
                kind,
                optim.kind.value,
                f"optim.kind={kind}",
            )
        )
    if (average is None) != (optim.ema_decay is None):
        held = "no averaged weights" if average is None else "averaged weights"
        fix = "optim.ema_decay=null" if average is None else "optim.ema_decay=0.999"
        problems.append(
            Problem(
                f"the checkpoint holds {held}, optim.ema_decay is", optim.ema_decay, "the same as before", fix
            )
        )
    raise_all(problems)
    return average


def _fix(name: str, value: object) -> str:
    if name == "train.seed":
        return f"train.seed={value}"
    if name == "packs_per_update":
        return f"train.tokens_per_update=<{value} x train.seq_len>"
    return "the store, max_len and train.seq_len of the first run"


def _draft_tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name.removeprefix(PREFIX): t
        for name, t in checkpoint["state_dict"].items()
        if name.startswith(PREFIX)
    }


def _tensor_problems(held: dict[str, Tensor], draft: nn.Module) -> list[Problem]:
    expected = {name: t for name, t in draft.state_dict().items() if name in kept_names(draft)}
    problems = [
        Problem("the checkpoint lacks a tensor of the draft", name)
        for name in sorted(expected.keys() - held.keys())
    ]
    problems += [
        Problem("the checkpoint holds a tensor the draft lacks", name)
        for name in sorted(held.keys() - expected.keys())
    ]
    for name in sorted(expected.keys() & held.keys()):
        if held[name].shape != expected[name].shape:
            problems.append(
                Problem(
                    f"{name} has another shape in the checkpoint",
                    tuple(held[name].shape),
                    str(tuple(expected[name].shape)),
                )
            )
        elif name in ("t2d", "d2t") and not torch.equal(held[name].cpu(), expected[name].cpu()):
            problems.append(
                Problem(
                    f"the checkpoint's draft vocabulary differs ({name})",
                    expected="the vocabulary the run began with",
                    fix="the store that the run began with, and its draft.vocab_size",
                )
            )
    return problems


def load_weights(draft: nn.Module, path: Path) -> int:
    """Put a checkpoint's weights into `draft`, for export: the averaged ones where it holds them.

    Returns the number of updates they had. Raises `IntegrityError` when the file is damaged or its tensors are
    not this draft's.
    """
    read_position(path)
    # mapped: most of the file is the optimizer's
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    held = _draft_tensors(checkpoint) | checkpoint.get(AVERAGE, {})
    problems = _tensor_problems(held, draft)
    if problems:
        raise IntegrityError(*problems)
    with torch.no_grad():
        for name, tensor in draft.state_dict().items():
            if name in held:  # into the tensor: modules of a draft that was in shards load no other way
                tensor.copy_(held[name])
    return int(checkpoint[KEY]["num_updates"])
