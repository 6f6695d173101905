"""Prompts of many conversations -> engine -> answers, as many at once as the engine likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from eagle3lab.engines.base import Answer, Answerer, Sampling
from eagle3lab.engines.sampling import hashed_seed
from eagle3lab.extract.capture import ask_each, timed
from eagle3lab.extract.generated import Generated
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.rows.dialogue import Dialogue, Prompt
from eagle3lab.rows.rows import Conversation

MAX_FAILED_CALLS = 3  # one after the other without one answer: the engine is broken, not the prompts


def answer_conversations(
    conversations: Sequence[Conversation],
    begin: Callable[[Conversation], Dialogue],
    start: Callable[[], Answerer],
    keep: Callable[[Sequence[tuple[Prompt, Answer]]], None],
    sampling: Sampling,
    *,
    seed: int,
    vocab_size: int,
    max_tokens: int | None,
    generated: Generated,
    seconds: dict[str, float],
    progress: CaptureProgress,
) -> dict[str, Dialogue]:
    """Dialogues by conversation id, all of them ended unless `generated.lost` names some.

    `begin` gives a dialogue with the answers known so far, `start` the engine, which is asked for only if
    an answer is missing; `keep` gets the answers of every call as soon as they are there. Once the
    conversations that are done without a gap have rows of `max_tokens` tokens, those after them are left
    out: which ones these are does not depend on how many prompts the engine takes at once.

    Raises EngineDied when the engine is gone.
    """
    dialogues: dict[str, Dialogue] = {}
    lost: dict[str, str] = {}
    full = _filled(conversations, dialogues, lost, max_tokens)
    first: dict[str, Conversation] = {}
    for one in conversations:  # equal conversations have one answer
        first.setdefault(one.conversation_id, one)
    upcoming = iter(first.values())
    active: list[Dialogue] = []
    engine: Answerer | None = None
    failed_calls = 0
    try:
        while True:
            while len(active) < (engine.answers_at_once if engine else 1) and not next(full):
                conversation = next(upcoming, None)
                if conversation is None:
                    break
                dialogue = dialogues[conversation.conversation_id] = begin(conversation)
                if dialogue.prompt is None:
                    progress.advance(1)
                else:
                    active.append(dialogue)
            if not active or next(full) or failed_calls == MAX_FAILED_CALLS:
                break
            if engine is None:
                engine = start()
                continue
            prompts = [dialogue.prompt for dialogue in active if dialogue.prompt is not None]
            with timed(seconds, "generate"):
                answers = _ask(engine, prompts, sampling, seed, vocab_size)
            known = [(p, a) for p, a in zip(prompts, answers, strict=True) if not isinstance(a, str)]
            keep(known)
            failed_calls = 0 if known else failed_calls + 1
            for dialogue, answer in zip(active, answers, strict=True):
                if isinstance(answer, str):
                    lost[dialogue.conversation_id] = answer
                else:
                    generated.count(answer)
                    dialogue.answer(answer.token_ids, answer.ended)
            left = [d for d in active if d.prompt is not None and d.conversation_id not in lost]
            progress.advance(len(active) - len(left))
            active = left
    finally:
        generated.seconds = seconds.get("generate", 0.0)
        names = {key: f"{first[key].source} ({key[:12]})" for key in lost}
        generated.lost = {names[key]: reason for key, reason in lost.items()}
        if engine is not None:
            engine.close()
    return dialogues


def seed_of(seed: int, prompt: Prompt) -> int:
    """The seed of one answer, of 63 bits: a hash of the run's seed, the conversation and the turn."""
    return hashed_seed(seed, prompt.conversation_id, prompt.turn)


def _filled(
    conversations: Sequence[Conversation],
    dialogues: dict[str, Dialogue],
    lost: dict[str, str],
    max_tokens: int | None,
) -> Iterator[bool]:
    """At every step, whether the conversations that are done without a gap hold `max_tokens` by now."""
    num_tokens = position = 0
    while True:
        while max_tokens is not None and num_tokens < max_tokens and position < len(conversations):
            key = conversations[position].conversation_id
            dialogue = dialogues.get(key)
            if dialogue is None or (dialogue.prompt is not None and key not in lost):
                break
            num_tokens += dialogue.built.num_tokens
            position += 1
        yield max_tokens is not None and num_tokens >= max_tokens


def _ask(
    engine: Answerer, prompts: Sequence[Prompt], sampling: Sampling, seed: int, vocab_size: int
) -> list[Answer | str]:
    def ask(some: Sequence[Prompt]) -> list[Answer]:
        return engine.answer(
            [prompt.token_ids for prompt in some],
            sampling,
            [seed_of(seed, prompt) for prompt in some],
            [prompt.max_new_tokens for prompt in some],
        )

    def judge(answer: Answer, prompt: Prompt) -> Answer | str:
        return fault(answer, prompt, sampling, vocab_size) or answer

    return ask_each(prompts, ask, judge, unit="prompts")


def fault(answer: Answer, prompt: Prompt, sampling: Sampling, vocab_size: int) -> str:
    """Why this cannot be an answer to this prompt; empty when it can."""
    ids, stops = answer.token_ids, set(sampling.stop_token_ids)
    if not ids:
        return "empty result: no token"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"bad answer: token ids outside 0..{vocab_size - 1}"
    if any(token in stops for token in ids[:-1]) or (ids[-1] in stops) != answer.ended:
        return "bad answer: a stop token that does not end it, or an end without one"
    limit = prompt.max_new_tokens
    if len(ids) > limit or (not answer.ended and len(ids) < limit):
        return f"bad answer: {len(ids)} tokens without an end where {limit} were allowed"
    return ""
