"""The needed work against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3lab.config.flops import StepWork, flops_per_token, needed_flops
from eagle3lab.config.schema import DraftConfig, Shapes, TrainingStep

# h 4, ffn 6, 2 heads and 1 key head of 2: q 4, kv 2; draft vocabulary 10
SHAPES = Shapes(4, 6, 8, 2, 1, 2, 20, 1000)
ONE = DraftConfig(name="eagle3", vocab_size=10, ttt_steps=2)
WORK = StepWork(
    tokens=5, pairs=15, context=4, context_pairs=10, needed=(3, 2), needed_pairs=(9, 5), losses=(2, 1)
)
KEYS, OTHERS = 2 * 8 * 2, 8 * 4 + 4 * 4 + 3 * 4 * 6  # 32 and 120


def test_the_pruned_step_of_one_layer_needs_what_its_formula_says() -> None:
    fusion = 4 * 3 * 16 * 4
    step_0 = 6 * KEYS * 4 + 6 * OTHERS * 3 + 12 * 4 * 9
    step_1 = 6 * (KEYS + OTHERS) * 2 + 12 * 4 * (5 + 1 * 2)
    heads = 4 * 40 * 3 + 2 * 40 * 2
    assert needed_flops(ONE, SHAPES, 3, WORK, pruned=True) == fusion + step_0 + step_1 + heads == 6928


def test_the_unpruned_step_computes_every_position_at_every_step() -> None:
    fusion = 4 * 3 * 16 * 5
    step_0 = 6 * (KEYS + OTHERS) * 5 + 12 * 4 * 15
    step_1 = 6 * (KEYS + OTHERS) * 5 + 12 * 4 * (15 + 5)
    heads = 4 * 40 * 10 + 2 * 40 * 5
    assert needed_flops(ONE, SHAPES, 3, WORK, pruned=False) == fusion + step_0 + step_1 + heads


def test_only_the_last_of_several_layers_is_pruned_at_step_0() -> None:
    two = DraftConfig(name="eagle3_2layer", vocab_size=10, ttt_steps=2, num_layers=2)
    keys, others = 2 * 4 * 2, 4 * 4 + 4 * 4 + 3 * 4 * 6
    first = 6 * (KEYS + OTHERS) * 4 + 12 * 4 * 10 + 6 * (KEYS + OTHERS) * 2 + 12 * 4 * 7
    last = 6 * (keys * 4 + others * 3) + 12 * 4 * 9 + 6 * (keys + others) * 2 + 12 * 4 * 7
    fusion, heads = 4 * 3 * 16 * 4, 4 * 40 * 3 + 2 * 40 * 2
    assert needed_flops(two, SHAPES, 3, WORK, pruned=True) == fusion + first + last + heads


def test_a_trained_norm_before_the_fusion_needs_its_input_gradient_too() -> None:
    normed = DraftConfig(name="eagle31", vocab_size=10, ttt_steps=2, fc_norm=True)
    more = needed_flops(normed, SHAPES, 3, WORK, pruned=True) - needed_flops(
        ONE, SHAPES, 3, WORK, pruned=True
    )
    assert more == 2 * 3 * 16 * 4


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("length", "supervised"), [(7, 3), (7, 7), (4, 1), (2, 2), (5, 0), (1, 1)])
def test_the_work_of_an_answer_is_what_counting_positions_gives(
    length: int, supervised: int, window: int | None
) -> None:
    steps, reach = 3, None if window is None else window - 1
    mask = [p >= length - supervised for p in range(length)]
    losses = [{j for j in range(length - k) if mask[j + k]} for k in range(steps)]
    needed = [set().union(*losses[k:]) for k in range(steps)]
    keys = {j: [i for i in range(j + 1) if window is None or i > j - window] for j in range(length)}
    context = {i for j in needed[0] for i in keys[j]}
    found = StepWork.of_answer(length, supervised, steps, reach, window)
    assert found == StepWork(
        length,
        sum(map(len, keys.values())),
        len(context),
        sum(len(keys[j]) for j in context),
        tuple(map(len, needed)),
        tuple(sum(len(keys[j]) for j in rows) for rows in needed),
        tuple(map(len, losses)),
    )


def test_fewer_supervised_tokens_need_less_and_pruning_never_more() -> None:
    qwen = Shapes(4096, 12288, 36, 32, 8, 128, 151936, 8190735360)
    draft = DraftConfig(name="eagle3")
    whole = flops_per_token(replace(draft, step=TrainingStep.reference), qwen, 3)
    shares = [flops_per_token(draft, qwen, 3, supervised_share=s) for s in (0.25, 0.5, 1.0)]
    assert shares[0] < shares[1] < shares[2] <= whole
    # the three steps' matrices, heads and attention of one position, written out
    layer = 2 * 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288
    head, pairs = 4096 * 32000, 1025 / 2
    expected = 4 * 3 * 4096**2 + 18 * layer + 14 * head + 12 * 4096 * (3 * pairs + 3)
    assert whole == pytest.approx(expected)


def test_a_trained_head_needs_its_weight_gradient_too() -> None:
    trained = replace(ONE, train_head=True)
    more = needed_flops(trained, SHAPES, 3, WORK, pruned=True) - needed_flops(
        ONE, SHAPES, 3, WORK, pruned=True
    )
    assert more == 2 * 40 * 3  # 2 h V for each guess in the loss
