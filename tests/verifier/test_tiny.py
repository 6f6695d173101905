from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3lab.config.errors import UserError
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eagle3lab.verifier.locate import asset_path
from eagle3lab.verifier.weights import load_edge_weights, verifier_logits

PASSAGE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to "
    "do: once or twice she had peeped into the book her sister was reading"
)
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am Alice, said Alice."},
    {"role": "user", "content": "Where is the Queen?"},
    {"role": "assistant", "content": " In the garden\n"},
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(asset_path("tiny"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(asset_path("tiny"))


@pytest.fixture(scope="module")
def facts() -> VerifierFacts:
    return read_facts(asset_path("tiny"))


def perplexity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return math.exp(model(ids[None], labels=ids[None]).loss.item())


def test_it_has_learned_its_text(model: torch.nn.Module, tokenizer) -> None:
    ids = torch.tensor(tokenizer.encode(PASSAGE))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    assert perplexity(model, ids) < 80
    assert perplexity(model, shuffled) > 1000


def test_verifier_logits_equal_hugging_face(model: torch.nn.Module, tokenizer, facts: VerifierFacts) -> None:
    kept: dict[str, torch.Tensor] = {}

    def keep(module, inputs, output):
        kept["last"] = output[0] if isinstance(output, tuple) else output

    handle = model.model.layers[-1].register_forward_hook(keep)
    try:
        with torch.no_grad():
            expected = model(torch.tensor([tokenizer.encode(PASSAGE)])).logits
    finally:
        handle.remove()
    logits = verifier_logits(kept["last"], load_edge_weights(facts), facts.rms_norm_eps)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_default_aux_layers_collapse_and_1_2_3_are_proposed(facts: VerifierFacts) -> None:
    with pytest.raises(UserError, match=r"model\.aux_layer_ids=\[1, 2, 3\]"):
        default_aux_layer_ids(facts.num_layers)
    assert check_aux_layer_ids([1, 2, 3], facts.num_layers) == (1, 2, 3)


def test_facts(facts: VerifierFacts) -> None:
    assert (facts.hidden_size, facts.intermediate_size, facts.num_layers) == (128, 384, 4)
    assert (facts.vocab_size, facts.max_positions) == (1024, 128)
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (2, (3,), 0)


@pytest.mark.parametrize("answer", [2, 4])
def test_served_prompt_and_answer_concatenate_to_the_rendered_conversation(answer: int, tokenizer) -> None:
    whole = tokenizer.apply_chat_template(TURNS[: answer + 1])["input_ids"]
    prompt = tokenizer.apply_chat_template(TURNS[:answer], add_generation_prompt=True)["input_ids"]
    content = tokenizer.encode(TURNS[answer]["content"])
    assert whole == [*prompt, *content, tokenizer.eos_token_id]
    assert whole.count(tokenizer.bos_token_id) == 1
    assert whole.count(tokenizer.eos_token_id) == answer + 1


def test_template_refuses_what_it_cannot_say(tokenizer) -> None:
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    with pytest.raises(Exception, match="no place for tools"):
        tokenizer.apply_chat_template(TURNS[:2], tools=[tool])


def test_known_text_round_trips(tokenizer) -> None:
    for text in ("", " a", "two  spaces", "line\n\nline ", "caf\u00f9 \u2014 \u201cyes,\u201d"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
