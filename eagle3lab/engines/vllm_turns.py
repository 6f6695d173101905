"""How `Turns` touches a `vllm.LLM`, by its public parts alone. Imports no vllm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3lab.engines.turns import Turns
from eagle3lab.engines.vllm_files import drop_files, file_of

FLUSH_STEPS = 3


def turns_over(llm: Any) -> Turns:
    """Requests of several threads to one `vllm.LLM`; answers that nobody waits for lose their files."""

    def add(prompts: Sequence[Any], parameters: Sequence[Any]) -> list[tuple[str, ...]]:
        # an answer has the name that was given out, or the same without vLLM's random ending
        names = llm.enqueue(prompts, parameters, use_tqdm=False)
        return [tuple({name, name.rpartition("-")[0] or name}) for name in names]

    def step() -> list[tuple[str, Any]]:
        return [(answer.request_id, answer) for answer in llm.llm_engine.step() if answer.finished]

    def rest() -> None:
        # the scheduler of an engine in this very process moves only when it is asked for output, and hands the
        # last finished requests' states over when it moves; in processes of its own it moves by itself
        if in_process(llm):
            for _ in range(FLUSH_STEPS):
                llm.llm_engine.engine_core.get_output()

    return Turns(add, step, rest, lambda answer: drop_files([file_of(answer)]))


def in_process(llm: Any) -> bool:
    """Whether the engine's core runs in this process and not in one of its own."""
    return hasattr(llm.llm_engine.engine_core, "engine_core")
