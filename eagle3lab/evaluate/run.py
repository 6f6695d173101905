"""A draft and prompts -> acceptance by real decoding, beside the verifier alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from eagle3lab.config.check_decode import one_at_a_time
from eagle3lab.config.errors import IntegrityError, Problem, UserError, raise_all
from eagle3lab.config.schema import (
    Backend,
    DecodeConfig,
    HardwareConfig,
    ModelConfig,
    Precision,
    PromptsConfig,
)
from eagle3lab.draft.export import load_draft
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.select import DTYPES, pick_backend, pick_device
from eagle3lab.evaluate.drafts import exported, other_template_args, untrained_copy, vocabulary_figures
from eagle3lab.evaluate.overlap import check_overlap
from eagle3lab.evaluate.progress import pass_line, progress
from eagle3lab.evaluate.prompts import read_prompts
from eagle3lab.evaluate.reference import SPEED as reference_speed
from eagle3lab.evaluate.reference import decode_by_reference
from eagle3lab.evaluate.results import Evaluation, Pass, Task, summarise_passes
from eagle3lab.evaluate.served import SPEED as served_speed
from eagle3lab.evaluate.served import decode_by_vllm
from eagle3lab.rows.render import decode as decode_text
from eagle3lab.rows.render import render_prompt
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.verifier.facts import read_facts, weight_fingerprint
from eagle3lab.verifier.locate import locate_verifier
from eagle3lab.verifier.weights import load_edge_weights

PREFILL_TOKENS = 512  # of one forward on the CPU; a GPU takes more
# Share of the largest logit within which two tokens are a tie that rounding may decide. bf16 rounds a logit to steps of
# 0.4 to 0.8 % of it. Measured: docs/results/smollm2.md.
NEAR_TIE = {Precision.fp32: 1e-4, Precision.bf16: 4e-2}


def evaluate_draft(
    *,
    draft: Path,
    model: ModelConfig,
    hardware: HardwareConfig,
    prompts: PromptsConfig,
    decode: DecodeConfig,
    out: Path,
    simulated: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> Evaluation:
    """Decode every prompt with the verifier alone and with the draft; write `out/evaluation.json`.

    Args:
        simulated: what training says of this draft, for the report: `acceptance_length` and `ttt_steps`.
    Raises:
        UserError: no prompt fits, draft and verifier do not belong together, or the back end cannot run.
        IntegrityError: a text differs from the verifier's own by more than rounding; the file is
            written before, with every difference.
    """
    console = console or Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    path = locate_verifier(model)
    facts = read_facts(path)
    difference = other_template_args(draft, model)
    if difference:
        say(difference)
    tokenizer = load_tokenizer(model, path)
    tasks, of_prompts = _tasks(draft, tokenizer, model, prompts, decode, facts.max_positions, say)
    dtype, device = DTYPES[decode.precision], pick_device(hardware)
    backend = pick_backend(decode.backend, device)
    if backend is Backend.hf:
        raise_all(list(one_at_a_time(decode.batch_sizes)))
    # before any engine is started: it refuses a draft of another verifier
    trained = load_draft(draft, facts, load_edge_weights(facts), attention="sdpa", dtype=dtype).eval()
    drafts: dict[str, nn.Module] = {"trained": trained}
    if decode.untrained:
        drafts["untrained"] = untrained_copy(trained, decode.seed)
    end_ids = frozenset({*facts.eos_token_ids, tokenizer.eos_token_id} - {None})
    longest = max(len(task.ids) + task.budget for task in tasks) + 3 * _overhang(decode)
    request = EngineRequest(
        path,
        facts,
        model,
        dtype,
        device,
        max_len=min(facts.max_positions, longest),
        batch_tokens=PREFILL_TOKENS,
        parallel=hardware.engine,
    )
    if backend is Backend.vllm:
        passes, of_engine = _served(request, draft, drafts, tasks, decode, end_ids, say)
    else:
        passes, of_engine = _by_reference(request, drafts, tasks, decode, end_ids, console)

    own = next(p for p in passes if p.way.k == 0).texts
    evaluation = Evaluation(
        setup={
            "verifier": {
                "name": model.name,
                "config_hash": facts.config_hash,
                "weight_fingerprint": weight_fingerprint(path),
                "architecture": facts.architecture,
            },
            "draft": str(draft),
            "draft_vocabulary": vocabulary_figures(trained, [t for text in own for t in text.tokens]),
            "simulated": simulated,
            "aux_layer_ids": list(trained.config.eagle_aux_hidden_state_layer_ids),
            **of_prompts,
            "template_args": dict(model.template_args),
            "max_new_tokens": decode.max_new_tokens,
            "k": list(decode.k),
            "temperature": list(decode.temperature),
            "batch_sizes": list(decode.batch_sizes),
            "proposal": decode.proposal.value,
            "precision": decode.precision.value,
            "device": device,
            "seed": decode.seed,
            "backend": backend.value,
            **of_engine,
        },
        variants=summarise_passes(tasks, passes, seed=decode.seed),
        tasks=tuple(tasks),
        passes=tuple(passes),
        texts=tuple(decode_text(tokenizer, text.tokens) for text in own),
    )
    file = evaluation.write(out)
    _refuse_unexplained(evaluation, file)
    return evaluation


def _tasks(
    draft: Path,
    tokenizer: Any,
    model: ModelConfig,
    prompts: PromptsConfig,
    decode: DecodeConfig,
    max_positions: int,
    say: Callable[[str], None],
) -> tuple[list[Task], dict[str, Any]]:
    """What is decoded, and what the report says of the prompts: those the draft knows or that are too long are left out."""
    chosen = read_prompts(prompts)
    rendered = [(prompt, render_prompt(tokenizer, list(prompt.messages), model)) for prompt in chosen]
    rendered, overlap = check_overlap(draft, rendered, prompts)
    if overlap.note:
        say(overlap.note)
    room = max_positions - _overhang(decode)
    fitting = [(prompt, ids) for prompt, ids in rendered if len(ids) < room]
    if not fitting:
        raise UserError(
            Problem(
                f"none of the {len(rendered)} prompts of {prompts.name} fits the verifier",
                f"{min(len(ids) for _, ids in rendered)} tokens and more",
                f"fewer than {room} tokens",
                "prompts=ANOTHER",
            )
        )
    too_long = [prompt.prompt_id for prompt, ids in rendered if len(ids) >= room]
    said = {
        "prompts": {
            "name": prompts.name,
            "num_read": len(chosen),
            "num_decoded": len(fitting),
            "left_out": {"too_long": too_long, **overlap.left_out},
            "num_turns_left_out": sum(prompt.num_turns_left_out for prompt, _ in fitting),
        },
        "compared_with_training_rows": list(overlap.compared),
    }
    return [
        Task(prompt, tuple(ids), min(decode.max_new_tokens, room - len(ids))) for prompt, ids in fitting
    ], said


def _overhang(decode: DecodeConfig) -> int:
    """How far the last verification step may reach beyond a text's budget."""
    return max(decode.k) + 1


def _served(
    request: EngineRequest,
    draft: Path,
    drafts: Mapping[str, nn.Module],
    tasks: Sequence[Task],
    decode: DecodeConfig,
    end_ids: frozenset[int],
    say: Callable[[str], None],
) -> tuple[Sequence[Pass], dict[str, Any]]:
    """vLLM's passes, and what the report says of it."""
    with exported(draft, drafts) as directories:
        served = decode_by_vllm(
            request,
            directories,
            tasks,
            decode,
            end_ids=end_ids,
            near_tie=NEAR_TIE[decode.precision],
            done=lambda found: say(pass_line(found)),
        )
    figures = {
        "versions": served.versions,
        "num_late_steps": served.num_late_steps,
        "speed": served_speed,
        "eager": request.parallel.eager,
    }
    return served.passes, figures


def _by_reference(
    request: EngineRequest,
    drafts: Mapping[str, nn.Module],
    tasks: Sequence[Task],
    decode: DecodeConfig,
    end_ids: frozenset[int],
    console: Console,
) -> tuple[Sequence[Pass], dict[str, Any]]:
    """The reference decoder's passes, and what the report says of it."""
    verifier = HuggingFaceEngine(
        request.path, request.facts, request.dtype, request.device, request.model.trust_remote_code
    )
    with progress(console, len(tasks)) as done:
        passes = decode_by_reference(
            verifier,
            {name: module.to(request.device) for name, module in drafts.items()},
            tasks,
            decode,
            aux_layer_ids=tuple(drafts["trained"].config.eagle_aux_hidden_state_layer_ids),
            end_ids=end_ids,
            near_tie=NEAR_TIE[decode.precision],
            done=done,
        )
    figures = {"versions": verifier.versions(), "speed": reference_speed}
    verifier.close()
    return passes, figures


def _refuse_unexplained(evaluation: Evaluation, file: Path) -> None:
    backend = evaluation.setup["backend"]
    problems = [
        Problem(
            f"prompt {prompt_id}, {way.variant} draft, k={way.k}, {way.batch_size} together: the text leaves the "
            f"verifier's own greedy text at new token {difference.position}",
            f"token {difference.drafted} instead of {difference.plain}, logit gap {difference.logit_gap}",
            "the same tokens, or a gap that rounding explains",
            f"the decoder ({backend}) is at fault, not the draft: report it with {file}",
        )
        for prompt_id, way, difference in evaluation.unexplained
    ]
    if problems:
        raise IntegrityError(*problems)
