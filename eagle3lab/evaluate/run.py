"""A draft and prompts -> acceptance by real decoding, beside the verifier alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.config.schema import DecodeConfig, HardwareConfig, ModelConfig, Precision, PromptsConfig
from eagle3lab.draft.export import load_draft
from eagle3lab.draft.format import PROVENANCE_FILE
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.select import DTYPES, pick_device
from eagle3lab.evaluate.decoder import decode_plain, decode_with_draft, first_difference, prefill
from eagle3lab.evaluate.prompts import Prompt, read_prompts
from eagle3lab.evaluate.results import Evaluation, PromptResult, Trial, VariantResult, summarise_variant
from eagle3lab.rows.render import decode as decode_text
from eagle3lab.rows.render import render_prompt
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.locate import locate_verifier
from eagle3lab.verifier.weights import load_edge_weights

WARM_UP_TOKENS = 2
# Share of the largest logit within which two tokens are a tie that rounding may decide.
NEAR_TIE = {Precision.fp32: 1e-4, Precision.bf16: 2e-2}


def evaluate_draft(
    *,
    draft: Path,
    model: ModelConfig,
    hardware: HardwareConfig,
    prompts: PromptsConfig,
    decode: DecodeConfig,
    out: Path,
    seed: int = 0,
    console: Console | None = None,
) -> Evaluation:
    """Decode every prompt with the verifier alone and with the draft; write `out/evaluation.json`.

    Args:
        seed: of the untrained draft's weights (`decode.untrained`) and of the bootstrap.
    Raises:
        UserError: no prompt fits, or draft and verifier do not belong together.
        IntegrityError: a text differs from the verifier's own by more than rounding; the file is
            written before, with every difference.
    """
    console = console or Console()
    path = locate_verifier(model)
    facts = read_facts(path)
    difference = other_template_args(draft, model)
    if difference:
        console.print(difference, markup=False, highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(model, path)
    chosen = read_prompts(prompts)
    rendered = [(prompt, render_prompt(tokenizer, list(prompt.messages), model)) for prompt in chosen]
    room = max(decode.k) + 1  # the last verification step may reach beyond the budget
    fitting = [(prompt, ids) for prompt, ids in rendered if len(ids) + room < facts.max_positions]
    if not fitting:
        raise UserError(
            Problem(
                f"none of the {len(rendered)} prompts of {prompts.name} fits the verifier",
                f"{min(len(ids) for _, ids in rendered)} tokens and more",
                f"fewer than {facts.max_positions - room} tokens",
                "prompts=ANOTHER",
            )
        )
    dtype, device = DTYPES[decode.precision], pick_device(hardware)
    trained = load_draft(draft, facts, load_edge_weights(facts), attention="sdpa").to(device, dtype).eval()
    drafts: dict[str, nn.Module] = {"trained": trained}
    if decode.untrained:
        drafts["untrained"] = untrained_copy(trained, seed)
    aux_layer_ids = tuple(trained.config.eagle_aux_hidden_state_layer_ids)
    engine = HuggingFaceEngine(path, facts, dtype, device, model.trust_remote_code)
    end_ids = frozenset({*facts.eos_token_ids, tokenizer.eos_token_id} - {None})

    near_tie = NEAR_TIE[decode.precision]
    # once without being measured: first calls allocate and compile
    _decode_prompt(engine, aux_layer_ids, drafts, *fitting[0], decode.k, WARM_UP_TOKENS, end_ids, near_tie)
    results = []
    for prompt, ids in track(
        fitting, "decode", console=console, disable=not console.is_terminal, transient=True
    ):
        budget = min(decode.max_new_tokens, facts.max_positions - len(ids) - room)
        result = _decode_prompt(
            engine, aux_layer_ids, drafts, prompt, ids, decode.k, budget, end_ids, near_tie
        )
        results.append(replace(result, text=decode_text(tokenizer, result.plain.tokens)))
        if not console.is_terminal:
            _say_prompt(console, results[-1], len(results), len(fitting))
    engine.close()

    left_out = [prompt.prompt_id for prompt, ids in rendered if len(ids) + room >= facts.max_positions]
    evaluation = Evaluation(
        setup={
            "verifier": {
                "name": model.name,
                "config_hash": facts.config_hash,
                "architecture": facts.architecture,
            },
            "draft": str(draft),
            "aux_layer_ids": list(aux_layer_ids),
            "prompts": {
                "name": prompts.name,
                "num_read": len(rendered),
                "num_decoded": len(results),
                "left_out": {"too_long": left_out},
                "num_turns_left_out": sum(p.num_turns_left_out for p, _ in fitting),
            },
            "template_args": dict(model.template_args),
            "max_new_tokens": decode.max_new_tokens,
            "temperature": 0.0,
            "precision": decode.precision.value,
            "device": device,
            "seed": seed,
            "backend": "hf",
        },
        variants=_variants(results, drafts, decode.k, seed),
        prompts=tuple(results),
    )
    file = evaluation.write(out)
    _refuse_unexplained(evaluation, file)
    return evaluation


def other_template_args(draft: Path, model: ModelConfig) -> str | None:
    """What to say when the prompts are rendered otherwise than the rows that the draft was trained on."""
    file = draft / PROVENANCE_FILE
    provenance = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    trained = provenance.get("store", {}).get("template_args")
    if trained is None or trained == dict(model.template_args):
        return None
    return (
        f"NOTE: the draft was trained on rows with model.template_args={trained}, these prompts are rendered "
        f"with {dict(model.template_args)}: its acceptance here is not that of its training"
    )


def untrained_copy(trained: Any, seed: int) -> Any:
    """The same draft before training: matrices drawn as `build_draft` draws them, norms one."""
    fresh = copy.deepcopy(trained)
    std = fresh.config.transformer_layer_config.initializer_range
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in fresh.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.fill_(1.0)
    return fresh


def _decode_prompt(
    engine: HuggingFaceEngine,
    aux_layer_ids: Sequence[int],
    drafts: Mapping[str, nn.Module],
    prompt: Prompt,
    ids: Sequence[int],
    ks: Sequence[int],
    budget: int,
    end_ids: frozenset[int],
    near_tie: float,
) -> PromptResult:
    session = engine.session(aux_layer_ids)
    start = prefill(session, ids)
    plain = decode_plain(session, start, budget, end_ids)
    trials = []
    for variant, draft in drafts.items():
        for k in ks:
            decoded = decode_with_draft(session, start, partial(ChainDrafter, draft), k, budget, end_ids)
            trials.append((variant, k, decoded))
    # compared at the end: the comparison runs the prompt again, which must not be between two timings
    compared = tuple(
        Trial(variant, k, decoded, first_difference(session, start, plain.tokens, decoded.tokens, near_tie))
        for variant, k, decoded in trials
    )
    return PromptResult(prompt, len(ids), plain, "", compared)


def _variants(
    results: Sequence[PromptResult], drafts: Mapping[str, nn.Module], ks: Sequence[int], seed: int
) -> tuple[VariantResult, ...]:
    return tuple(summarise_variant(variant, k, results, seed=seed) for variant in drafts for k in ks)


def _say_prompt(console: Console, result: PromptResult, number: int, total: int) -> None:
    trials = ", ".join(
        f"{t.variant} k={t.k}: {1 + t.counts.accepted / t.counts.drafts:.2f}"
        for t in result.trials
        if t.counts.drafts
    )
    text = f"decode {number}/{total} {result.prompt.prompt_id}: {len(result.plain.tokens)} tokens; {trials}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _refuse_unexplained(evaluation: Evaluation, file: Path) -> None:
    problems = []
    for prompt_id, trial in evaluation.unexplained:
        difference = trial.difference
        assert difference is not None
        problems.append(
            Problem(
                f"prompt {prompt_id}, {trial.variant} draft, k={trial.k}: the text leaves the verifier's own "
                f"greedy text at new token {difference.position}",
                f"token {difference.drafted} instead of {difference.plain}, logit gap {difference.logit_gap}",
                "the same tokens, or a gap that rounding explains",
                f"the decoder is at fault, not the draft: report it with {file}",
            )
        )
    if problems:
        raise IntegrityError(*problems)
