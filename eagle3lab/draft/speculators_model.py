"""The only module that imports speculators: its EAGLE-3 draft model, its losses, and what is relied on.

The import takes seconds, so it happens on first use. A release whose names or signatures moved is
reported as a `UserError` that names the installed version, before a model is built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.schema import DraftConfig, HeadStart, LossConfig, LossKind
from eagle3lab.draft.format import all_finite
from eagle3lab.draft.layer_config import layer_config
from eagle3lab.draft.losses import TokenLoss
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.layer_ids import check_aux_layer_ids

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3lab.verifier.weights import EdgeWeights

SUPPORTED_VERSIONS = ">=0.9,<0.10"

# Our names of the attention implementations against those the decoder layers look up.
ATTENTION = {"flex": "simple_flex_attention", "sdpa": "sdpa", "eager": "eager"}

_LOSS_NAMES = {
    LossKind.kl: "kl_div",
    LossKind.reverse_kl: "rkl",
    LossKind.js: "jsd",
    LossKind.ce: "ce",
    LossKind.tv: "tv",
    LossKind.lk: "lk_hybrid",
}

# (module, attribute, names that must be parameters of it, names that must be pydantic fields of it)
_REQUIRED: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "speculators.models.eagle3",
        "Eagle3DraftModel.forward",
        (
            "hidden_states",
            "input_ids",
            "document_ids",
            "loss_mask",
            "position_ids",
            "verifier_last_hidden_states",
            "ttt_steps",
            "ttt_step_loss_decay",
            "loss_config",
        ),
        (),
    ),
    (
        "speculators.models.eagle3",
        "Eagle3SpeculatorConfig",
        (),
        (
            "transformer_layer_config",
            "draft_vocab_size",
            "norm_before_residual",
            "eagle_aux_hidden_state_layer_ids",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "speculators_config",
        ),
    ),
    (
        "speculators.config",
        "SpeculatorsConfig",
        (),
        ("algorithm", "proposal_methods", "default_proposal_method", "verifier"),
    ),
    ("speculators.config", "VerifierConfig", (), ("name_or_path", "architectures")),
    ("speculators.proposals.greedy", "GreedyTokenProposalConfig", (), ("speculative_tokens",)),
    ("speculators.losses", "resolve_loss_config", ("spec", "implementation"), ()),
)


def required_symbols() -> str:
    """Check every name, signature and field used here; returns the installed version.

    Raises UserError with all that is missing or changed, the installed version and the range that works.
    """
    install = f"pip install 'speculators{SUPPORTED_VERSIONS}'"
    try:
        version = metadata.version("speculators")
    except metadata.PackageNotFoundError:
        raise UserError(
            Problem("speculators is not installed", expected=SUPPORTED_VERSIONS, fix=install)
        ) from None
    expected = f"speculators {SUPPORTED_VERSIONS}, installed is {version}"
    problems = []
    for module, path, parameters, fields in _REQUIRED:
        name = f"{module}.{path}"
        try:
            found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            problems.append(Problem(f"{name} is missing", str(error), expected, install))
            continue
        absent = [p for p in parameters if p not in inspect.signature(found).parameters]
        absent += [f for f in fields if f not in getattr(found, "model_fields", {})]
        if absent:
            problems.append(Problem(f"{name} no longer takes {', '.join(absent)}", None, expected, install))
    raise_all(problems)
    return version


@functools.cache
def _checked_api() -> Any:
    required_symbols()
    import speculators.models.eagle3

    return speculators.models.eagle3


def build_draft(
    cfg: DraftConfig,
    facts: VerifierFacts,
    edge: EdgeWeights,
    vocabulary: DraftVocabulary,
    aux_layer_ids: Sequence[int],
    *,
    attention: str,
    seed: int,
) -> Eagle3DraftModel:
    """An untrained fp32 draft on the CPU, with the verifier's embedding and norm frozen in it.

    Its head: rows of the verifier's or random, frozen or trained, as `cfg` says. Trainable matrices are N(0, 0.02)
    drawn from `seed` alone, in the model's own order and a random head last: all others are the same for any
    draft vocabulary and any head. `attention`: flex | sdpa | eager. The global RNG is left as it was.
    Raises UserError for impossible sizes or layer ids, and for an unsupported speculators.
    """
    api = _checked_api()
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    ids = check_aux_layer_ids(aux_layer_ids, facts.num_layers)
    assert vocabulary.verifier_size == facts.vocab_size, (vocabulary.verifier_size, facts.vocab_size)
    config = api.Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(cfg, facts, num_aux=len(ids)),
        draft_vocab_size=vocabulary.size,
        norm_before_residual=cfg.norm_before_residual,
        norm_before_fc=cfg.norm_before_fc,
        fc_norm=cfg.fc_norm,
        norm_output=cfg.norm_output,
        eagle_aux_hidden_state_layer_ids=list(ids),
        verifier_config_hash=facts.config_hash,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=cfg.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(facts.path), architectures=[facts.architecture]),
        ),
    )
    model = _construct(config, attention)
    _draw_trainable(model, config.transformer_layer_config.initializer_range, seed, cfg.head)
    model.load_vocab_mappings(vocabulary.t2d, vocabulary.d2t)
    assert edge.embedding is not None
    _give(model.embed_tokens.weight, edge.embedding)
    fill_verifier_target(model, edge, vocabulary)
    if cfg.head is HeadStart.verifier:
        _give(model.lm_head.weight, model.verifier_lm_head.weight.data.clone())
    model.lm_head.weight.requires_grad_(cfg.train_head)
    assert_finite(model)
    return model


def draft_from_config(config: Mapping[str, Any], *, attention: str) -> Eagle3DraftModel:
    """A draft of the shapes in an exported config.json. Its matrices are NaN, and take no memory, until they are
    assigned."""
    return _construct(_checked_api().Eagle3SpeculatorConfig.from_dict(dict(config)), attention)


# What `draft_from_config` raises where a value is of a kind that speculators or transformers does not take.
UNREADABLE_CONFIG = (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError)


class _NothingDrawn(TorchDispatchMode):
    """Modules made within leave memory untouched where they would draw at random, or mark it with NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.aten
        drawn = func in (ops.normal_.default, ops.uniform_.default)
        if drawn or (func is ops.fill_.Scalar and math.isnan(args[1])):
            return args[0]
        return func(*args, **(kwargs or {}))


def _construct(config: Any, attention: str) -> Eagle3DraftModel:
    """A draft whose matrices are a single NaN, spread: to draw and touch gigabytes that are replaced takes seconds."""
    # Never serialised, so it must be set before every construction; layers keep a reference to it.
    config.transformer_layer_config._attn_implementation = ATTENTION[attention]
    with torch.random.fork_rng(devices=[]), _NothingDrawn():
        model = _checked_api().Eagle3DraftModel(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.new_tensor(torch.nan).expand(parameter.shape)
    return model


def _draw_trainable(model: Any, std: float, seed: int, head: HeadStart) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    if head is HeadStart.random:
        drawn.append(model.lm_head.weight)
    for parameter in drawn:
        _give(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def fill_verifier_target(model: Any, edge: EdgeWeights, vocabulary: DraftVocabulary) -> None:
    """Give the model the verifier's own norm and head rows, from which training targets are made.

    These two are the verifier's, frozen, and in no export. `edge.norm` is a plain RMSNorm weight.
    """
    assert edge.norm is not None
    assert edge.head is not None
    _give(model.verifier_norm.weight, edge.norm)
    _give(model.verifier_lm_head.weight, edge.head[vocabulary.t2d.to(edge.head.device)])


def _give(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values` the parameter's, without a copy where device and dtype are the same."""
    assert parameter.shape == values.shape, (tuple(parameter.shape), tuple(values.shape))
    parameter.data = values.to(parameter)


def assert_finite(model: nn.Module) -> None:
    """Tensors that were neither drawn nor loaded are NaN: none may be left."""
    bad = [name for name, p in model.named_parameters() if not all_finite(p)]
    assert not bad, f"not loaded or not finite: {', '.join(bad)}"


def vocabulary_of(model: Any) -> DraftVocabulary:
    """The vocabulary a draft model holds; the full one where it has no maps."""
    if model.t2d is None:
        return DraftVocabulary.full(model.verifier_vocab_size)
    return DraftVocabulary(model.t2d.cpu(), model.d2t.cpu())


def speculators_loss(loss: LossConfig, implementation: str) -> TokenLoss:
    """The token loss of `losses.token_loss`, made of speculators' own: logits `[1, S, Vd]` -> fp32 `[1, S]`.

    `implementation`: eager, or fused (Triton, CUDA only), which holds no `[S, Vd]` of its own. Both compute in
    fp32 whatever the logits are. Dynamo cannot trace the fused kernels inside the compiled forward, so they
    are kept out of it.
    """
    _checked_api()
    from speculators.losses import resolve_loss_config

    def term(kind: LossKind) -> TokenLoss:
        name = _LOSS_NAMES[kind]
        function: Any = resolve_loss_config(name, implementation)[name][0]
        if kind is LossKind.lk:
            return functools.partial(function, eta=loss.lk_eta)
        if kind is LossKind.ce and implementation == "eager":
            # it alone stays in the dtype of the logits
            return lambda logits, targets: function(logits.float(), targets)
        found: TokenLoss = function
        return found

    terms = [(term(kind), weight) for kind, weight in loss.terms()]

    def compute(logits: Tensor, targets: Tensor) -> Tensor:
        values = [weight * function(logits, targets) for function, weight in terms]
        return functools.reduce(torch.add, values)

    return torch.compiler.disable(compute) if implementation == "fused" else compute
