"""Drafts of real widths with random weights on the GPU, packs for them, and the two ways to step them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import speculators.losses.fused as fused
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle3lab.config.schema import LossConfig, Shapes
from eagle3lab.draft.frozen import shrink_frozen
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.pruned.step import pruned_forward
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, ttt_forward

# traced inside speculators' compiled forward, its fused loss fails in dynamo
fused.fused_kl_div_loss = torch.compiler.disable(fused.fused_kl_div_loss)


@dataclass(frozen=True)
class Sizes:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    seq_len: int
    document: int

    def shapes(self) -> Shapes:
        return Shapes(self.hidden, self.ffn, 36, self.heads, self.kv_heads, 128, self.vocab, 8_000_000_000)


QWEN3_8B = Sizes(4096, 12288, 32, 8, 151936, 32000, 8192, 1024)
SMALL = Sizes(512, 1024, 4, 2, 4096, 2048, 1024, 200)
WIDE = Sizes(7168, 18432, 64, 64, 163840, 32000, 4096, 1024)


def build(sizes: Sizes, *, attention: str, device: str = "cuda") -> nn.Module:
    """speculators' draft with fp32 masters; a bf16 verifier's embedding and head in its frozen weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=sizes.draft_vocab,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[2, 18, 33],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Eagle3DraftModel(config)
    model.to(device).train()
    chosen = torch.arange(sizes.draft_vocab) * (sizes.vocab // sizes.draft_vocab)
    t2d = torch.zeros(sizes.vocab, dtype=torch.bool)
    t2d[chosen] = True
    model.load_vocab_mappings(t2d, chosen - torch.arange(sizes.draft_vocab))
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in (model.embed_tokens.weight, model.lm_head.weight):
            parameter.normal_(0, 0.02, generator=generator)
            parameter.copy_(parameter.bfloat16())
        model.verifier_lm_head.weight.copy_(model.lm_head.weight)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
    return model


def make_batch(
    sizes: Sizes, share: float, ttt_steps: int, seed: int, device: str = "cuda"
) -> dict[str, Tensor]:
    """A full pack of equal documents, each with the last `share` supervised, but for `ttt_steps` at either end.

    So no target of a later step crosses a border, and speculators' own loss counts what ours does.
    """
    g = torch.Generator(device).manual_seed(seed)
    place = torch.arange(sizes.seq_len, device=device)
    inside = place % sizes.document
    first = max(round(sizes.document * (1 - share)), ttt_steps)
    whole = place < sizes.seq_len // sizes.document * sizes.document
    states: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": g}
    return {
        "hidden_states": torch.randn(1, sizes.seq_len, 3 * sizes.hidden, **states),
        "verifier_last_hidden_states": torch.randn(1, sizes.seq_len, sizes.hidden, **states) * 3,
        "input_ids": torch.randint(3, sizes.vocab, (1, sizes.seq_len), device=device, generator=g),
        "document_ids": torch.where(whole, place // sizes.document, -1)[None],
        "position_ids": (inside + 1)[None],
        "loss_mask": (whole & (inside >= first) & (inside < sizes.document - ttt_steps))[None].long(),
    }


def own_step_parts(model: nn.Module, dtype: torch.dtype) -> Callable[..., TTTOutput]:
    """The pruned forward as `train.py` sets it up for forward KL on CUDA."""
    if dtype is torch.bfloat16:
        saved = shrink_frozen(model, dtype)
        print(f"frozen weights in bf16: {saved / 2**30:.2f} GiB less", flush=True)
    forward = partial(pruned_forward, loss=loss_and_gradient(LossConfig(), compiled=True), compiled=True)
    return lambda model, batch, ttt_steps, *, plan: forward(model, batch, ttt_steps, plan=plan)


def truth_gradients(
    model: nn.Module, batch: dict[str, Tensor], ttt_steps: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of speculators' uncompiled dense forward in fp32."""
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    recorder = LossRecorder(token_loss(LossConfig()))
    output = ttt_forward(model, batch, ttt_steps, recorder, compiled=False)
    loss = (output.loss_sums / output.num_supervised.clamp(min=1)).sum()
    model.zero_grad()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return loss.item(), found
