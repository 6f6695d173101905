from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.schema import LayerType
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.speculators_model import vocabulary_of
from eagle3lab.draft.ttt import LossRecorder, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary

VARIANTS = [
    {},
    {"attention": "eager"},
    {"num_layers": 2, "layer_type": LayerType.qwen3},
    {"norm_output": True, "norm_before_fc": True},
    {"fc_norm": True, "norm_before_residual": False},
]


def prefilled(
    model: Any, batch: dict[str, Tensor], num_pairs: int, chunks: tuple[int, ...] = ()
) -> ChainDrafter:
    drafter = ChainDrafter(model)
    start = 0
    for end in (*chunks, num_pairs):
        drafter.extend(batch["hidden_states"][0, start:end], batch["input_ids"][0, start:end])
        start = end
    return drafter


@pytest.mark.parametrize("fields", VARIANTS)
def test_a_chain_is_what_the_training_forward_predicts_when_fed_that_chain(
    fields: dict[str, Any],
    make_draft: Callable[..., Any],
    make_batch: Callable[..., Any],
    recorder: LossRecorder,
) -> None:
    """Teacher forcing with the draft's own tokens behind start t is drafting from t."""
    model, steps, size = make_draft(**fields), 4, 18
    batch = make_batch((size,))
    vocabulary = vocabulary_of(model)
    for start in (0, 6, 13):
        chain = prefilled(model, batch, start + 1).propose(steps)
        forced = {k: v.clone() for k, v in batch.items()}
        forced["input_ids"][0, start + 1 : start + steps] = torch.tensor(chain[: steps - 1])
        with torch.no_grad():
            output = ttt_forward(model, forced, steps, recorder)
        assert vocabulary.to_verifier(output.draft_tokens[:, start]).tolist() == chain


@pytest.mark.parametrize("fields", [*VARIANTS, {"sliding_window": 4}, {"sliding_window": 4, "num_layers": 2}])
def test_a_cached_chain_equals_a_computation_from_scratch(
    fields: dict[str, Any], make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model, batch = make_draft(**fields), make_batch((16,))
    chain, logits = prefilled(model, batch, 12, chunks=(5, 6, 9)).propose_with_logits(4)
    again, scratch = prefilled(model, batch, 12).propose_with_logits(4)
    assert chain == again
    torch.testing.assert_close(logits, scratch, rtol=1e-4, atol=1e-4)


def test_step_zero_logits_equal_the_training_forward_in_a_sliding_window(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model, batch = make_draft(sliding_window=5), make_batch((16,))
    seen: list[Tensor] = []

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(logits)
        return logits[..., 0]

    with torch.no_grad():
        ttt_forward(model, batch, 1, LossRecorder(keep))
    drafter = ChainDrafter(model)
    ours = drafter.logits(drafter.extend(batch["hidden_states"][0], batch["input_ids"][0]))
    torch.testing.assert_close(ours, seen[0][0], rtol=1e-4, atol=1e-4)


def test_proposals_leave_no_trace_in_the_cache(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model, batch = make_draft(), make_batch((16,))
    with_proposals = ChainDrafter(model)
    for i in range(16):
        with_proposals.extend(batch["hidden_states"][0, i : i + 1], batch["input_ids"][0, i : i + 1])
        with_proposals.propose(1 + i % 5)
    assert with_proposals.num_pairs == 16
    _, logits = with_proposals.propose_with_logits(3)
    torch.testing.assert_close(
        logits, prefilled(model, batch, 16).propose_with_logits(3)[1], rtol=1e-4, atol=1e-4
    )


def test_a_long_sequence_outgrows_the_first_buffer(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model, batch = make_draft(), make_batch((200,))
    grown = prefilled(model, batch, 200, chunks=(40, 63, 64, 65, 130))
    torch.testing.assert_close(
        grown.propose_with_logits(2)[1],
        prefilled(model, batch, 200).propose_with_logits(2)[1],
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_drafter_that_was_reset_begins_anew(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model, batch = make_draft(), make_batch((16,))
    drafter = prefilled(model, batch, 14)
    drafter.reset()
    assert drafter.num_pairs == 0
    with pytest.raises(ValueError, match="extend"):
        drafter.propose(2)
    drafter.extend(batch["hidden_states"][0, :11], batch["input_ids"][0, :11])
    assert drafter.propose(4) == prefilled(model, batch, 11).propose(4)


def test_a_full_vocabulary_proposes_verifier_ids_directly(
    make_draft: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    model = make_draft(vocabulary=DraftVocabulary.full(128))
    chain, logits = prefilled(model, make_batch((8,)), 8).propose_with_logits(3)
    assert chain == logits.argmax(-1).tolist()


def test_misuse_is_refused(make_draft: Callable[..., Any], make_batch: Callable[..., Any]) -> None:
    batch = make_batch((4,))
    with pytest.raises(ValueError, match="flex"):
        ChainDrafter(make_draft(attention="flex"))
    with pytest.raises(ValueError, match="rotary frequencies are not fp32"):
        ChainDrafter(make_draft().to(torch.bfloat16))
    with pytest.raises(ValueError, match="pairs"):
        ChainDrafter(make_draft()).extend(batch["hidden_states"][0], batch["input_ids"][0, :3])
