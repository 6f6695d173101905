"""Validation of one pack against the verifier's own next tokens over its full vocabulary, made in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3lab.draft.ttt import TTTOutput, correct_over_full_vocabulary
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.weights import EdgeWeights, verifier_logits

LOGITS_BYTES = 256 * 2**20  # of one chunk of full-vocabulary logits


def verifier_argmax(last_hidden: Tensor, supervised: Tensor, edge: EdgeWeights, eps: float) -> Tensor:
    """The verifier's own next token at every supervised position, -1 elsewhere.

    Args:
        last_hidden: verifier's last hidden state, pre-norm. shape: [S, hidden_size]
        supervised: bool. shape: [S]
    Returns: shape: [S] int64, ids of the verifier's vocabulary.
    """
    assert edge.head is not None
    result = torch.full_like(supervised, -1, dtype=torch.long)
    positions = supervised.nonzero().squeeze(1)
    rows = max(1, LOGITS_BYTES // (4 * edge.head.shape[0]))
    for chunk in positions.split(rows):
        result[chunk] = verifier_logits(last_hidden[chunk], edge, eps).argmax(-1)
    return result


def pack_sums(
    output: TTTOutput,
    batch: Mapping[str, Tensor],
    vocabulary: DraftVocabulary,
    t2d: Tensor,
    edge: EdgeWeights,
    eps: float,
) -> dict[str, Tensor]:
    """What a pack adds to `validation_widths`. t2d: the vocabulary's, on the device. shape: [V]"""
    document_ids, loss_mask = batch["document_ids"][0], batch["loss_mask"][0]  # shape: [S]
    supervised = loss_mask.bool() & (document_ids >= 0)
    with torch.autocast(loss_mask.device.type, enabled=False):
        target = verifier_argmax(batch["verifier_last_hidden_states"][0], supervised, edge, eps)
    counts = correct_over_full_vocabulary(output.draft_tokens, vocabulary, target, document_ids, loss_mask)
    covered = t2d[target[supervised]].sum()
    return {"loss_step": output.token_loss_sums, **counts._asdict(), "covered": covered}
