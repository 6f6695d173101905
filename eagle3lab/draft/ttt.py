"""The training-time test: speculators' own forward over K steps, with per-token losses summed here.

speculators averages a pack's masked loss, lets targets cross document borders and multiplies NaN by 0.
So its loss is not used: a recording loss function keeps the per-token losses it asks for, and they are
summed under masks that respect borders. The trainer divides by what the update holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.draft.losses import TokenLoss
from eagle3lab.draft.vocabulary import DraftVocabulary

# FlexAttention's block masks are extended block-wise: another length gives wrong masks, not an error.
FLEX_BLOCK = 128


class LossRecorder:
    """A loss function for speculators that keeps what it computes. One per trainer, for all its steps.

    `token_loss` maps logits and targets `[1, S, Vd]` to fp32 `[1, S]`. The function handed to the model
    stays the same object, because a compiled forward guards on it, and is never traced itself.
    """

    def __init__(self, token_loss: TokenLoss) -> None:
        self._token_loss = token_loss
        self._token_losses: list[Tensor] = []
        self._target_tokens: Tensor | None = None
        self.loss_config = {"recorded": (torch.compiler.disable(self._record), 1.0)}

    def _record(self, logits: Tensor, targets: Tensor) -> Tensor:
        token_loss = self._token_loss(logits, targets)
        if not self._token_losses:
            self._target_tokens = targets.argmax(dim=-1)[0]
        self._token_losses.append(token_loss)
        # Without a graph: the model's own loss must hold on to nothing and lead nowhere.
        return token_loss.detach()

    def clear(self) -> None:
        """Forget an earlier forward, also one that raised."""
        self._token_losses, self._target_tokens = [], None

    def take(self) -> tuple[list[Tensor], Tensor]:
        """Per-token losses of every step, `[1, S - k]` with graph, and draft-vocabulary targets `[S]`."""
        losses, targets = self._token_losses, self._target_tokens
        self.clear()
        assert targets is not None, "the model never called its loss function"
        return losses, targets


@dataclass(frozen=True)
class TTTOutput:
    """What one pack gave. Column j of step k is the draft's guess made from start j, k tokens on."""

    loss_sums: Tensor  # shape: [K], with graph; sum of token losses of step k, times their weights if any
    token_loss_sums: Tensor  # shape: [K], without graph; the same without weights
    num_supervised: Tensor  # shape: [K], int64; tokens in each sum
    draft_tokens: Tensor  # shape: [K, S], draft-vocabulary ids
    correct: Tensor  # shape: [K, S], bool; equals the verifier's argmax over the draft vocabulary
    supervised: Tensor  # shape: [K, S], bool


def supervision_masks(loss_mask: Tensor, document_ids: Tensor, ttt_steps: int) -> Tensor:
    """Where a step's target counts: column j of step k needs target j + k supervised and of j's document.

    loss_mask: `[S]`, document_ids: `[S]` with -1 for padding. Returns bool `[K, S]`.
    """
    supervised = (loss_mask > 0) & (document_ids >= 0)
    masks = torch.zeros(ttt_steps, supervised.numel(), dtype=torch.bool, device=supervised.device)
    for k in range(min(ttt_steps, supervised.numel())):
        length = supervised.numel() - k
        masks[k, :length] = supervised[k:] & (document_ids[:length] == document_ids[k:])
    return masks


def ttt_forward(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    ttt_steps: int,
    recorder: LossRecorder,
    *,
    token_weights: Tensor | None = None,
    compiled: bool = True,
) -> TTTOutput:
    """Unroll the draft K steps over one pack and sum its token losses per step.

    batch: `input_ids`, `document_ids`, `loss_mask`, `position_ids` `[1, S]`, `hidden_states`
    `[1, S, n_aux * H]`, `verifier_last_hidden_states` `[1, S, H]`; other entries are ignored.
    token_weights: fp32 `[K, S]`, entry (k, j) for the guess of step k made from start j; default 1. Entries
    without supervision are not read.
    speculators compiles the forward where CUDA is available; `compiled=False` runs it uncompiled there, for
    sdpa or eager attention (uncompiled FlexAttention holds all scores).
    Raises UserError for a pack length that FlexAttention would mask wrongly.
    """
    document_ids, loss_mask = batch["document_ids"], batch["loss_mask"]  # shape: [1, total_seq_len]
    seq_len = document_ids.shape[1]
    config: Any = model.config
    if config.transformer_layer_config._attn_implementation == "simple_flex_attention":
        _check_flex_length(seq_len)
    masks = supervision_masks(loss_mask[0], document_ids[0], ttt_steps)  # shape: [K, total_seq_len]
    # A target at an unsupervised position is in no loss, but as NaN it would reach the gradient as 0 * NaN.
    last_states = torch.where(masks[0][None, :, None], batch["verifier_last_hidden_states"], 0)

    recorder.clear()
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        draft_tokens, _, _ = model(
            hidden_states=batch["hidden_states"],
            input_ids=batch["input_ids"],
            document_ids=document_ids,
            loss_mask=masks[0][None],
            position_ids=batch["position_ids"],
            verifier_last_hidden_states=last_states,
            ttt_steps=ttt_steps,
            ttt_step_loss_decay=1.0,
            loss_config=recorder.loss_config,
        )
    token_losses, target_tokens = recorder.take()
    assert len(token_losses) == ttt_steps, (len(token_losses), ttt_steps)

    guesses = torch.cat(draft_tokens)  # shape: [K, total_seq_len]
    correct = torch.zeros_like(masks)
    sums, weighted = [], []
    for k, token_loss in enumerate(token_losses):
        length = seq_len - k
        counted = torch.where(masks[k, :length], token_loss[0], 0)
        sums.append(counted.sum())
        if token_weights is not None:
            weighted.append(torch.where(masks[k, :length], counted * token_weights[k, :length], 0).sum())
        correct[k, :length] = guesses[k, :length] == target_tokens[k:]
    token_loss_sums = torch.stack(sums)
    loss_sums = torch.stack(weighted) if weighted else token_loss_sums
    return TTTOutput(loss_sums, token_loss_sums.detach(), masks.sum(dim=1), guesses, correct, masks)


def _check_flex_length(seq_len: int) -> None:
    if seq_len % FLEX_BLOCK:
        raise UserError(
            Problem(
                "FlexAttention needs a pack length that is a multiple of its block",
                seq_len,
                f"a multiple of {FLEX_BLOCK}",
                f"train.seq_len={-(-seq_len // FLEX_BLOCK) * FLEX_BLOCK}",
            )
        )


class FullVocabularyCounts(NamedTuple):
    """Counts over the verifier's whole vocabulary, per TTT step; sums of them over packs stay valid."""

    correct: Tensor  # shape: [K]; supervised guesses that are the verifier's argmax
    prefix_correct: Tensor  # shape: [K]; start positions whose steps 0..k are all right
    totals: Tensor  # shape: [K]; supervised guesses; entry 0 is the number of start positions


def correct_over_full_vocabulary(
    draft_tokens: Tensor,
    vocabulary: DraftVocabulary,
    verifier_argmax: Tensor,
    document_ids: Tensor,
    loss_mask: Tensor,
) -> FullVocabularyCounts:
    """Compare guesses with the verifier's argmax over its full vocabulary, as verification does.

    draft_tokens: `[K, S]` draft-vocabulary ids. verifier_argmax: `[S]` verifier ids, entry p for the token
    after input p. document_ids, loss_mask: `[S]`. A start position is one supervised at step 0. Its chain
    holds at depth k when targets j..j+k are all supervised, of one document, and guessed right: a chain
    that runs past the answer's end has failed there, as nothing is accepted after the end of a turn.
    """
    masks = supervision_masks(loss_mask, document_ids, draft_tokens.shape[0])
    guesses = vocabulary.to_verifier(draft_tokens)  # shape: [K, S]
    chain = masks[0].clone()
    correct, prefix = [], []
    for k in range(draft_tokens.shape[0]):
        hit = torch.zeros_like(chain)
        length = max(chain.numel() - k, 0)
        hit[:length] = masks[k, :length] & (guesses[k, :length] == verifier_argmax[k:])
        chain = chain & hit
        correct.append(hit.sum())
        prefix.append(chain.sum())
    return FullVocabularyCounts(torch.stack(correct), torch.stack(prefix), masks.sum(dim=1))


def simulated_acceptance_length(prefix_correct: Tensor, totals: Tensor) -> float:
    """1 + sum over k of P(steps 0..k all right), P = prefix_correct[k] / totals[0]; NaN without starts.

    The denominator is the number of supervised start positions, the same for every k. This is the mean
    tokens per verification step, bonus token included, if every start were equally likely and the
    true text were the verifier's greedy output. shapes: [K], [K]
    """
    starts = int(totals[0])
    return 1.0 + int(prefix_correct.sum()) / starts if starts else float("nan")
