"""Which predictions are trained on: the rule that turns a row's loss mask into the training mask."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3lab.config.schema import Supervision


def apply_supervision(loss_mask: Tensor, rule: Supervision) -> Tensor:
    """The mask of a row before the shift, entry i for the prediction of token i + 1 made from token i.

    loss_mask: [T], non-zero where the verifier itself would emit token i. Returns bool [T]. A prediction counts
    - input_token: if token i, which is put in, is supervised: speculators' rule. These are the places a
      served draft drafts from, and one more: what follows the end of the turn.
    - predicted_token: if token i + 1 is supervised: all tokens of the answer, the first one included, which
      a served draft never has to guess. The last token of a row predicts nothing that is in the row.
    - both: if both are: exactly the guesses that a served draft can get right.

    Prompt a b, answer c d e (e ends the turn), then f of the next prompt:

        token            a b c d e f
        loss mask        0 0 1 1 1 0
        input_token      0 0 1 1 1 0   c->d d->e e->f
        predicted_token  0 1 1 1 0 0   b->c c->d d->e
        both             0 0 1 1 0 0   c->d d->e

    A later TTT step k counts, by the same entries, the prediction made k tokens further on.
    """
    emitted = loss_mask != 0
    if rule is Supervision.input_token:
        return emitted
    follows = torch.zeros_like(emitted)
    follows[:-1] = emitted[1:]
    return follows if rule is Supervision.predicted_token else emitted & follows
