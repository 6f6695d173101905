"""A plan that does not fit is refused with overrides that would: each was planned again, and fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from .errors import Problem, UserError
from .plan_extraction import ExtractPlan
from .plan_training import TRAINING_SHARE, TrainPlan
from .schema import (
    DraftConfig,
    EngineConfig,
    ExtractorConfig,
    HardwareConfig,
    Shapes,
    Strategy,
    TrainerConfig,
    TrainingStep,
)

PACK_STEP = 128  # FlexAttention's blocks
MOST_PROPOSALS = 3
ENGINE_SHARES = (0.92, 0.95)  # of a device's memory, where nothing else runs on it

PlanTraining = Callable[[DraftConfig, HardwareConfig, TrainerConfig], TrainPlan]
PlanExtraction = Callable[[HardwareConfig, ExtractorConfig], ExtractPlan]


def require_training_fit(
    plan: TrainPlan,
    draft: DraftConfig,
    hardware: HardwareConfig,
    train: TrainerConfig,
    shapes: Shapes,
    again: PlanTraining,
    *,
    longest_row: int,
) -> None:
    """Raise UserError for a plan that does not fit. `again` plans changed values; a pack holds `longest_row`."""
    if plan.fits:
        return
    tried = islice(_training_fits(plan, draft, hardware, train, shapes, again, longest_row), MOST_PROPOSALS)
    raise UserError(
        Problem(
            f"the plan does not fit {hardware.name}",
            f"{plan.total_gib:.1f} GiB per device",
            f"at most {TRAINING_SHARE:.0%} of {plan.device_memory_gib:.1f} GiB",
            _one_of(list(tried)) or "hardware=NAME with more memory per device",
        )
    )


def require_extraction_fit(
    plan: ExtractPlan,
    hardware: HardwareConfig,
    extract: ExtractorConfig,
    shapes: Shapes,
    again: PlanExtraction,
    *,
    num_devices: int,
) -> None:
    """Raise UserError for an engine that does not fit. `num_devices`: of this node."""
    if plan.cache_bytes_per_token and shapes.num_heads % plan.tensor_parallel:
        raise UserError(undivided_heads(shapes.num_heads, hardware.engine))
    if plan.fits:
        return
    tried = islice(_extraction_fits(plan, hardware, extract, shapes, again, num_devices), MOST_PROPOSALS)
    needed = sum(plan.memory_gib.values()) + plan.cache_bytes_per_token * plan.max_len / 2**30
    raise UserError(
        Problem(
            f"the verifier does not fit {hardware.name}",
            f"{needed:.1f} GiB per device, {plan.memory_gib['weights']:.1f} of them weights "
            f"(tensor parallel {plan.tensor_parallel}), with the cache of one row of {plan.max_len:,} tokens",
            f"at most {plan.usable_gib:.1f} of {plan.device_memory_gib:.1f} GiB",
            _one_of(list(tried)) or _larger_node(plan, hardware, extract, shapes, again),
        )
    )


def undivided_heads(num_heads: int, engine: EngineConfig) -> Problem:
    """vLLM gives every device of an engine the same number of heads."""
    fewer = max(n for n in range(1, engine.tensor_parallel + 1) if num_heads % n == 0)
    replicas = engine.tensor_parallel * engine.data_parallel // fewer
    return Problem(
        f"{num_heads} attention heads cannot be split over hardware.engine.tensor_parallel",
        engine.tensor_parallel,
        f"a divisor of {num_heads}",
        f"hardware.engine.tensor_parallel={fewer} hardware.engine.data_parallel={replicas}",
    )


def _one_of(proposals: list[str]) -> str:
    return ", or ".join(proposals)


def _training_fits(
    plan: TrainPlan,
    draft: DraftConfig,
    hardware: HardwareConfig,
    train: TrainerConfig,
    shapes: Shapes,
    again: PlanTraining,
    longest_row: int,
) -> Iterator[str]:
    """Overrides under which the plan fits, the least of a change first; combinations where no single one does."""
    if train.acceptance.every_updates:
        acceptance = replace(train.acceptance, every_updates=None)
        if again(draft, hardware, replace(train, acceptance=acceptance)).fits:
            yield "train.acceptance.every_updates=null"
    pruned, sharded = replace(draft, step=TrainingStep.pruned), replace(hardware, strategy=Strategy.fsdp2)
    can_prune = draft.step is TrainingStep.reference
    can_shard = plan.num_devices > 1 and hardware.strategy is not Strategy.fsdp2
    ways = [
        ("", draft, hardware, True),
        ("draft.step=pruned", pruned, hardware, can_prune),
        ("hardware.strategy=fsdp2", draft, sharded, can_shard),
        ("draft.step=pruned hardware.strategy=fsdp2", pruned, sharded, can_prune and can_shard),
    ]
    ways = [way for way in ways if way[3]]
    whole = [words for words, d, h, _ in ways[1:] if again(d, h, train).fits]
    yield from (words for words in whole if not any(w in words for w in whole if w != words))
    for words, d, h, _ in ways:
        shorter = _shorter_packs(d, h, train, again, plan, longest_row)
        found = [more for more in (shorter, _fewer_steps(d, h, train, again)) if more]
        yield from (f"{words} {more}".strip() for more in found)
        if found or whole:
            return
    words, d, h, _ = ways[-1]
    width = d.intermediate_size or shapes.intermediate_size
    for narrower in range((width - 1) // 256 * 256, 0, -256):
        if again(replace(d, intermediate_size=narrower), h, train).fits:
            yield f"{words} draft.intermediate_size={narrower}".strip()
            return


def _shorter_packs(
    draft: DraftConfig,
    hardware: HardwareConfig,
    train: TrainerConfig,
    again: PlanTraining,
    plan: TrainPlan,
    longest_row: int,
) -> str:
    """The longest pack that fits and holds every row; the tokens of an update stay as near as they can."""
    for length in range((train.seq_len - 1) // PACK_STEP * PACK_STEP, longest_row - 1, -PACK_STEP):
        words, tokens = f"train.seq_len={length}", train.tokens_per_update
        if tokens is not None:
            unit = length * plan.num_devices
            tokens = max(1, round(tokens / unit)) * unit
            words += f" train.tokens_per_update={tokens}"
        if again(draft, hardware, replace(train, seq_len=length, tokens_per_update=tokens)).fits:
            return words
    return ""


def _fewer_steps(
    draft: DraftConfig, hardware: HardwareConfig, train: TrainerConfig, again: PlanTraining
) -> str:
    for steps in range(draft.ttt_steps - 1, 0, -1):
        if again(replace(draft, ttt_steps=steps), hardware, train).fits:
            return f"draft.ttt_steps={steps}"
    return ""


def _extraction_fits(
    plan: ExtractPlan,
    hardware: HardwareConfig,
    extract: ExtractorConfig,
    shapes: Shapes,
    again: PlanExtraction,
    num_devices: int,
) -> Iterator[str]:
    engine = hardware.engine
    if plan.cache_bytes_per_token:
        for parallel in range(engine.tensor_parallel + 1, num_devices + 1):
            replicas = min(engine.data_parallel, num_devices // parallel)
            if shapes.num_heads % parallel:
                continue
            wider = replace(engine, tensor_parallel=parallel, data_parallel=replicas)
            if again(replace(hardware, engine=wider), extract).fits:
                fewer = f" hardware.engine.data_parallel={replicas}"
                fewer = fewer if replicas != engine.data_parallel else ""
                yield f"hardware.engine.tensor_parallel={parallel}{fewer}"
                break
        for share in ENGINE_SHARES:
            more = replace(hardware, engine=replace(engine, memory_share=share))
            if share > engine.memory_share and again(more, extract).fits:
                yield f"hardware.engine.memory_share={share}"
                break
        if engine.cache_gib is not None:
            measured = replace(hardware, engine=replace(engine, cache_gib=None))
            if again(measured, extract).fits:
                yield "hardware.engine.cache_gib=null"
    for tokens in (2**k for k in range(17, 7, -1)):
        if tokens < extract.batch_tokens and again(hardware, replace(extract, batch_tokens=tokens)).fits:
            yield f"extract.batch_tokens={tokens}"
            return


def _larger_node(
    plan: ExtractPlan,
    hardware: HardwareConfig,
    extract: ExtractorConfig,
    shapes: Shapes,
    again: PlanExtraction,
) -> str:
    """How many of these devices one node would need, where this one has too few."""
    for parallel in range(plan.tensor_parallel + 1, shapes.num_heads + 1):
        if shapes.num_heads % parallel or not plan.cache_bytes_per_token:
            continue
        engine = replace(hardware.engine, tensor_parallel=parallel, data_parallel=1)
        if again(replace(hardware, engine=engine, num_devices=parallel), extract).fits:
            return (
                f"a node with {parallel} of these devices: hardware.num_devices={parallel} "
                f"hardware.engine.tensor_parallel={parallel} hardware.engine.data_parallel=1"
            )
    return "hardware=NAME with more memory per device"
