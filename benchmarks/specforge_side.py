"""specforge's EAGLE-3 step as a side of the step comparison, with the weights and tokens of the others.

Of specforge 0.2.0 (MIT) its own classes run, unchanged and without a stub: `Eagle3TrainStrategy`,
`OnlineEagle3Model`, `LlamaForCausalLMEagle3`, `TargetHead`, `BF16Optimizer`. These import neither sglang nor
yunchang nor accelerate; they need Triton.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from step_models import Sizes
from torch import Tensor, nn
from train_step import Side

NOTES = {
    "specforge_step": "Eagle3TrainStrategy.forward_loss with target_repr hidden_state, backward, BF16Optimizer.step; "
    "not wrapped in FSDP, no gradient collectives, no logging; attention backend flex_attention, its default",
    "specforge_dtypes": "bf16 weights, gradients and activations, fp32 masters and AdamW states, as its trainer; "
    "the other two hold fp32 weights under bf16 autocast",
    "heads": "the draft's head is frozen on all sides, as speculators has it; specforge_shipped trains it, as "
    "specforge does and cannot be told not to",
    "specforge_kept": "the same with torch.cuda.empty_cache, which its forward calls in every step, doing nothing",
    "specforge_compact": "the same with compact_teacher=true: verifier logits in chunks of the vocabulary",
    "specforge_one_row": "the pack as one row: attention then runs over the whole pack and across documents, "
    "for specforge knows no documents in a row; everywhere else every document is a row of its own",
    "loss": "specforge: cross-entropy against the verifier's softmax over the draft vocabulary, averaged over all "
    "positions, those whose verifier argmax is outside the draft vocabulary masked; here that argmax is always "
    "inside, the decay is 1 instead of 0.8, and the residual is of the states before their norm (norm_before_residual "
    "false), so all three compute one function; to compare values, specforge's is multiplied by "
    "positions / supervised and the entropy of the targets is taken off",
    "process": "importing specforge sets torch._dynamo.config.recompile_limit to 64 for every side; it asks for "
    "transformers 5.8.1 and ran with the version named above",
    "positions": "specforge takes unshifted rows and a full verifier head over the verifier's final-norm output; "
    "the shift and this projection are in its step, the final norm is not",
}


def plain_residual(model: Any) -> None:
    """The residual specforge knows: of the states before their norm."""
    model.layers[0].norm_before_residual = False


class SpecForge(Side):
    """specforge's draft, loss and optimizer with the weights of a draft of speculators."""

    name = "specforge"
    keep_cache = False

    def __init__(
        self, sizes: Sizes, source: Any, attention: str, dtype: torch.dtype, *, train_head: bool = False
    ) -> None:
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.optimizer import BF16Optimizer

        device = source.fc.weight.device
        config = copy.deepcopy(source.config.transformer_layer_config)
        config.draft_vocab_size = sizes.draft_vocab
        config._attn_implementation = "eager"  # what transformers would do; the backend is specforge's own
        with torch.device(device):
            draft = LlamaForCausalLMEagle3(config, attention_backend=attention)
        weights = dict(source.named_parameters()) | dict(source.named_buffers())
        with torch.no_grad():
            for name, tensor in (*draft.named_parameters(), ("t2d", draft.t2d), ("d2t", draft.d2t)):
                tensor.copy_(weights[theirs(name)])
        draft.freeze_embedding()
        draft.lm_head.weight.requires_grad = train_head
        self.online = OnlineEagle3Model(draft, attention_backend=attention).to(device, dtype).train()
        head = full_head(sizes, source).to(device, dtype)
        self.model = nn.ModuleList([self.online, head])
        self.mixed = BF16Optimizer(draft, lr=1e-4, max_grad_norm=0.5)
        self.optimizer = self.mixed.optimizer
        self.use(compact=False)

    def use(self, *, compact: bool) -> None:
        from specforge.training.strategies.base import Eagle3TrainStrategy

        self.strategy = Eagle3TrainStrategy(
            self.online, target_head=self.model[1], ploss_decay=1.0, compact_teacher=compact
        )

    def variant(self, name: str, *, keep_cache: bool = False, compact: bool = False) -> SpecForge:
        """The same weights and states, stepped in another way."""
        other = copy.copy(self)
        other.name, other.keep_cache = name, keep_cache
        other.use(compact=compact)
        return other

    def loss(self, batch: Any, plan: None = None) -> Tensor:
        self.online.length = self.ttt_steps
        if not self.keep_cache:
            return self.strategy.forward_loss(batch).loss
        with patch.object(torch.cuda, "empty_cache", lambda: None):
            return self.strategy.forward_loss(batch).loss

    def step(self) -> None:
        self.mixed.step()

    def gradients(self, batch: Any, supervised: int, entropy: float) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients in speculators' terms: divergence per supervised token, summed over steps."""
        loss = self.loss(batch)
        loss.backward()
        scale = batch.tensors["loss_mask"].numel() / supervised
        found = {}
        for name, parameter in self.online.draft_model.named_parameters():
            if parameter.grad is not None:
                found[theirs(name)] = parameter.grad.float() * scale
                parameter.grad = None
        return loss.item() * scale - self.ttt_steps * entropy, found


def theirs(name: str) -> str:
    """speculators' name of a weight of specforge's."""
    return name.replace("midlayer.", "layers.0.")


def full_head(sizes: Sizes, source: Any) -> nn.Module:
    """specforge's verifier head: the draft vocabulary's rows are the source's, no other token is ever likelier."""
    from specforge.modeling.target.target_head import TargetHead

    with tempfile.TemporaryDirectory() as folder, torch.device(source.fc.weight.device):
        content = {"model_type": "llama", "hidden_size": sizes.hidden, "vocab_size": sizes.vocab}
        (Path(folder) / "config.json").write_text(json.dumps(content))
        head = TargetHead(folder)
    with torch.no_grad():
        head.fc.weight.normal_(0, 0.0004, generator=torch.Generator(source.fc.weight.device).manual_seed(2))
        head.fc.weight[source.t2d] = source.verifier_lm_head.weight
    head.freeze_weights()
    return head.eval()


@torch.no_grad()
def as_rows(source: Any, batch: dict[str, Tensor], document: int, dtype: torch.dtype) -> Any:
    """A pack of equal documents as specforge's unshifted rows, the final norm applied; a rest is left out."""
    from specforge.runtime.contracts import TrainBatch

    rows = batch["input_ids"].shape[1] // document

    def cut(tensor: Tensor) -> Tensor:
        return tensor[0, : rows * document].unflatten(0, (rows, document))

    last = source.verifier_norm(batch["verifier_last_hidden_states"].to(source.verifier_norm.weight.dtype))
    ids = cut(batch["input_ids"])
    tensors = {
        "input_ids": ids.roll(1, dims=1),
        "attention_mask": torch.ones_like(ids),
        "loss_mask": cut(batch["loss_mask"]),
        "hidden_state": cut(batch["hidden_states"]).to(dtype),
        "target": cut(last).roll(1, dims=1).to(dtype),
    }
    names = [str(i) for i in range(rows)]
    return TrainBatch(names, "eagle3", tensors, metadata={"target_repr": "hidden_state"})
