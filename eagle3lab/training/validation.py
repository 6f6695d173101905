"""The verifier's own next tokens over its full vocabulary, in chunks: the targets of validation."""

from __future__ import annotations

import torch
from torch import Tensor

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
