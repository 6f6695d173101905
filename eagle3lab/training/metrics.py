"""Sums kept on the device and the named figures made from them. One all-reduce per logging interval.

Everything is a sum over tokens, packs and ranks, divided once at the end: a padded or repeated pack counts
nothing, and a mean of means cannot happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3lab.config.selection import REAL, SIMULATED, STEP
from eagle3lab.draft.ttt import TTTOutput

INTERVAL_NAMES = (
    "train/learning_rate",  # of the interval's last update
    "speed/tokens_per_second",  # real tokens, all ranks
    "speed/supervised_tokens_per_second",
    "speed/mfu",  # work needed as a share of hardware.peak_tflops, rank 0; empty where that is not set
    "speed/needed_tflops_per_device",  # work needed per second, rank 0: see `config.flops`
    "speed/data_wait_share",  # of training time, rank 0
    "speed/read_gb_per_second",  # of states from the store, rank 0 times the number of ranks
    "speed/peak_memory_gib",  # rank 0
)


class Sums:
    """Named sums, each a scalar or one per TTT step, in fp64 on the device; one set of them for every group.

    Adding never waits for the device; reducing does, once.
    """

    def __init__(self, widths: Mapping[str, int], device: torch.device | str, num_groups: int = 1) -> None:
        self._widths = dict(widths)
        self._values = torch.zeros(num_groups, sum(widths.values()), dtype=torch.float64, device=device)

    def add(self, values: Mapping[str, Tensor], group: int = 0) -> None:
        """Add one tensor of the right width for every name."""
        assert values.keys() == self._widths.keys(), f"{sorted(values)} is not {sorted(self._widths)}"
        parts = [values[name].detach().reshape(width).double() for name, width in self._widths.items()]
        self._values[group] += torch.cat(parts)

    def reduce(self) -> dict[str, list[float]]:
        """The sums over all ranks and groups. This rank's own stay as they are: reducing twice is harmless."""
        return self.reduce_groups()[0]

    def reduce_groups(self) -> tuple[dict[str, list[float]], list[dict[str, list[float]]]]:
        """The sums over all ranks: of all groups together, and of every group."""
        total = self._values.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        return self._by_name(total.sum(dim=0)), [self._by_name(group) for group in total]

    def _by_name(self, values: Tensor) -> dict[str, list[float]]:
        flat, result, start = values.tolist(), {}, 0
        for name, width in self._widths.items():
            result[name] = flat[start : start + width]
            start += width
        return result

    def reset(self) -> None:
        self._values.zero_()


def train_widths(ttt_steps: int) -> dict[str, int]:
    """What a training step adds up; `*_step` names have one value per TTT step."""
    return {
        "updates": 1,  # counted by rank 0
        "stop_requests": 1,  # batches trained after a signal to end the run
        "loss": 1,  # the optimised loss, this pack's share of its update
        "loss_step": ttt_steps,  # token losses
        "supervised_step": ttt_steps,  # tokens
        "correct_step": ttt_steps,  # drafted = verifier's argmax within the draft vocabulary
        "covered": 1,  # supervised positions whose input token is in the draft vocabulary
        "grad_norm": 1,  # before clipping, counted by rank 0
    }


@torch.no_grad()
def train_sums(
    output: TTTOutput,
    batch: Mapping[str, Tensor],
    t2d: Tensor,
    loss: Tensor,
    grad_norm: Tensor,
    *,
    updates: float,
    stop: float,
) -> dict[str, Tensor]:
    """What a pack adds to `train_widths`. t2d: the vocabulary's, on the device. shape: [V]"""
    supervised = batch["loss_mask"][0].bool()  # shape: [S]
    zero = grad_norm.new_zeros(())
    return {
        "updates": zero + updates,
        "stop_requests": zero + stop,
        "loss": loss,
        "loss_step": output.token_loss_sums,
        "supervised_step": output.num_supervised,
        "correct_step": (output.correct & output.supervised).sum(dim=1),
        "covered": (t2d[batch["input_ids"][0]] & supervised).sum(),
        "grad_norm": grad_norm,
    }


def validation_widths(ttt_steps: int) -> dict[str, int]:
    """What a validation step adds up, see `draft.ttt.FullVocabularyCounts`."""
    return {
        "loss_step": ttt_steps,
        "correct": ttt_steps,
        "prefix_correct": ttt_steps,
        "totals": ttt_steps,
        "covered": 1,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def train_figures(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Figures of one logging interval.

    `train/loss`: mean over the interval's updates of the loss that was optimised.
    `train/loss_step{k}`: mean token loss of TTT step k, whatever the normalisation of the loss.
    `train/accuracy_step{k}_draft_vocab`: share of supervised tokens where the draft's argmax is the
    verifier's argmax *within the draft vocabulary*, so not comparable between vocabularies.
    `train/token_coverage`: share of supervised positions whose input token is in the draft vocabulary.
    """
    updates = sums["updates"][0]
    figures = {"train/loss": _share(sums["loss"][0], updates)}
    for k, supervised in enumerate(sums["supervised_step"]):
        figures[f"train/loss_step{k}"] = _share(sums["loss_step"][k], supervised)
        figures[f"train/accuracy_step{k}_draft_vocab"] = _share(sums["correct_step"][k], supervised)
    figures["train/token_coverage"] = _share(sums["covered"][0], sums["supervised_step"][0])
    figures["train/grad_norm"] = _share(sums["grad_norm"][0], updates)
    return figures


def validation_figures(sums: Mapping[str, Sequence[float]], step_decay: float) -> dict[str, float]:
    """Figures of one validation, teacher-forced and over the verifier's full vocabulary.

    `val/accuracy_step{k}`: P(step k right), whatever the steps before it did.
    `val/acceptance_step{k}`: P(steps 0..k all right), of all supervised start positions.
    `val/conditional_accuracy_step{k}`: P(step k right | the steps before it all right).
    `val/simulated_acceptance_length`: 1 + sum over k of `val/acceptance_step{k}`, the bonus token included.
    `val/coverage`: share of supervised tokens whose verifier argmax lies in the draft vocabulary.
    `val/loss`: sum over k of step_decay**k * mean token loss of step k, over the draft vocabulary.
    Every figure is a mean over tokens supervised by input token, whatever loss.normalisation and
    loss.supervision say, so that runs which differ in them can be compared.
    """
    starts = sums["totals"][0]
    figures: dict[str, float] = {"val/loss": 0.0}
    length, before = 1.0, starts
    for k, total in enumerate(sums["totals"]):
        step_loss = _share(sums["loss_step"][k], total)
        prefix = sums["prefix_correct"][k]
        figures["val/loss"] += step_decay**k * step_loss
        figures[f"val/loss_step{k}"] = step_loss
        figures[f"val/accuracy_step{k}"] = _share(sums["correct"][k], total)
        figures[f"{STEP}{k}"] = _share(prefix, starts)
        figures[f"val/conditional_accuracy_step{k}"] = _share(prefix, before)
        length += _share(prefix, starts)
        before = prefix
    figures[SIMULATED] = length
    figures["val/coverage"] = _share(sums["covered"][0], starts)
    return figures


def domain_figures(
    names: Sequence[str], sums: Sequence[Mapping[str, Sequence[float]]], step_decay: float
) -> dict[str, float]:
    """`val/<domain>/simulated_acceptance_length`, `loss` and `accuracy_step{k}` of every domain.

    As in `validation_figures`, from the sums of that domain's rows alone. A domain without a supervised token
    has none.
    """
    figures: dict[str, float] = {}
    for domain, own in zip(names, sums, strict=True):
        if own["totals"][0]:
            whole = validation_figures(own, step_decay)
            kept = [SIMULATED, "val/loss", *(f"val/accuracy_step{k}" for k in range(len(own["totals"])))]
            figures |= {f"val/{domain}/{name.removeprefix('val/')}": whole[name] for name in kept}
    return figures


def domains_of(figures: Mapping[str, float]) -> list[str]:
    """The domains that figures tell apart, in their order."""
    parts = [name.split("/") for name in figures]
    return list(dict.fromkeys(p[1] for p in parts if p[0] == "val" and len(p) == 3))


def real_figures(num_steps: int, accepted_at: Sequence[int]) -> dict[str, float]:
    """Figures of real decoding with the draft, pooled over verification steps; none where there was no step.

    `val/real_acceptance_length`: tokens per verification step, the bonus token included.
    `val/real_acceptance_step{k}`: share of the steps in which drafted tokens 0..k were all accepted.
    """
    if num_steps == 0:
        return {}
    steps = {f"val/real_acceptance_step{k}": n / num_steps for k, n in enumerate(accepted_at)}
    return {REAL: 1.0 + sum(accepted_at) / num_steps, **steps}


def metric_names(ttt_steps: int, domains: Sequence[str] = (), num_drafted: int = 0) -> list[str]:
    """Every name that a run may log, in order; the two x-axes first.

    num_drafted: tokens per verification step where acceptance is measured by decoding, else 0.
    """
    train = train_figures({name: [0.0] * width for name, width in train_widths(ttt_steps).items()})
    ones = {name: [1.0] * width for name, width in validation_widths(ttt_steps).items()}
    by_domain = domain_figures(domains, [ones] * len(domains), 1.0)
    real = real_figures(1, [0] * num_drafted) if num_drafted else {}
    return ["update", "tokens", *train, *INTERVAL_NAMES, *validation_figures(ones, 1.0), *real, *by_domain]
