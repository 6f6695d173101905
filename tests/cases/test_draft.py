"""The shipped TRN, VOC and EXP cases that the draft alone decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.config.schema import DraftConfig, LossConfig, TrainingStep
from eagle3lab.draft.export import export_draft, load_draft, read_export
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.pruned.step import pruned_forward
from eagle3lab.draft.speculators_model import build_draft, vocabulary_of
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, correct_over_full_vocabulary, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.weights import EdgeWeights, load_edge_weights

CASES = Path(__file__).parent
K = 3


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


@pytest.fixture(scope="module")
def facts() -> VerifierFacts:
    return read_facts(CASES / "_shared" / "target_tiny")


@pytest.fixture(scope="module")
def edge(facts: VerifierFacts) -> EdgeWeights:
    return load_edge_weights(facts)


@pytest.fixture(scope="module")
def recorder() -> LossRecorder:
    return LossRecorder(token_loss(LossConfig()))


Step = Callable[[Any, dict[str, Tensor]], TTTOutput]


@pytest.fixture(params=list(TrainingStep), ids=lambda step: step.value)
def step(request: pytest.FixtureRequest, recorder: LossRecorder) -> Step:
    """A pack through the training step of that name."""
    if request.param is TrainingStep.reference:
        return lambda model, batch: ttt_forward(model, batch, K, recorder)
    loss = loss_and_gradient(LossConfig(), compiled=False)
    return lambda model, batch: pruned_forward(model, batch, K, loss, compiled=False)


def make(
    facts: VerifierFacts,
    edge: EdgeWeights,
    *,
    ids: list[int] | None = None,
    aux: tuple[int, ...] = (2, 4, 5),
    attention: str = "sdpa",
    scale: float = 1.0,
    **fields: Any,
) -> Any:
    vocabulary = DraftVocabulary.full(264) if ids is None else DraftVocabulary.from_ids(ids, 264)
    cfg = DraftConfig(name="case", **fields)
    model = build_draft(cfg, facts, edge, vocabulary, aux, attention=attention, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def pack(case: str, *names: str, seq_len: int | None = None) -> dict[str, Tensor]:
    """Rows of a case, aligned as (x[i+1], g[i], y[i+1], mask[i+1]) and laid one behind the other."""
    columns: dict[str, list[Tensor]] = {}
    for document, name in enumerate(names):
        row = load_file(CASES / case / f"{name}.safetensors")
        states, length = row["hidden_states"], len(row["token_ids"]) - 1
        for key, value in {
            "input_ids": row["token_ids"][1:],
            "hidden_states": states[:-1, :3].flatten(1),
            "verifier_last_hidden_states": states[1:, 3],
            "loss_mask": row["loss_mask"][1:],
            "position_ids": torch.arange(1, length + 1),
            "document_ids": torch.full((length,), document),
        }.items():
            columns.setdefault(key, []).append(value)
    batch = {key: torch.cat(values) for key, values in columns.items()}
    missing = (seq_len or 0) - len(batch["input_ids"])
    if missing > 0:
        for key, value in batch.items():
            fill = value.new_full((missing, *value.shape[1:]), -1 if key == "document_ids" else 0)
            batch[key] = torch.cat([value, fill])
    return {key: value[None] for key, value in batch.items()}


def run(model: Any, batch: dict[str, Tensor], step: Step) -> tuple[TTTOutput, dict[str, Tensor]]:
    model.zero_grad()
    output = step(model, batch)
    output.loss_sums.sum().backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_trn_01_a_document_never_sees_its_neighbour(
    facts: VerifierFacts, edge: EdgeWeights, step: Step
) -> None:
    case, model, losses = expected("TRN-01"), make(facts, edge, scale=20.0), []
    for names in case["packs"]:
        batch = pack("TRN-01", *names, seq_len=32)
        others = (batch["document_ids"] != len(names) - 1)[0]
        batch["loss_mask"][0, others] = 0
        batch["hidden_states"].requires_grad_()
        output, _ = run(model, batch, step)
        losses.append(output.loss_sums.detach())
        gradient = batch["hidden_states"].grad
        assert gradient is not None
        assert not gradient[0, others].any()
        assert gradient[0, ~others].any()
        # The rows' own losses add up when the neighbour is supervised too.
        whole, _ = run(model, pack("TRN-01", *names, seq_len=32), step)
        alone = [run(model, pack("TRN-01", name), step)[0].loss_sums.detach() for name in names]
        torch.testing.assert_close(whole.loss_sums.detach(), torch.stack(alone).sum(0), rtol=0, atol=1e-5)
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=0, atol=case["tolerance_fp32"])


def step_logits(model: Any, batch: dict[str, Tensor], step: TrainingStep) -> list[Tensor]:
    """Logits `[S - k, Vd]` of every step, in the order the loss sees them."""
    seen: list[Tensor] = []

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(logits[0])
        return logits[..., 0]

    def keep_rows(
        logits: Tensor, targets: Tensor, index: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(logits)
        return logits[..., 0], torch.zeros_like(logits), logits.argmax(dim=-1)

    if step is TrainingStep.reference:
        ttt_forward(model, batch, K, LossRecorder(keep))
    else:  # it computes the rows that carry loss: here all of them
        batch = {**batch, "loss_mask": (batch["document_ids"] >= 0).int()}
        pruned_forward(model, batch, K, keep_rows, compiled=False)
    return seen


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("step", TrainingStep)
@torch.no_grad()
def test_trn_03_no_attention_sees_the_future(
    facts: VerifierFacts, edge: EdgeWeights, step: TrainingStep
) -> None:
    case, length, by_attention = expected("TRN-03"), 11, {}
    for attention in ("eager", "sdpa", "flex"):
        model = make(facts, edge, attention=attention, scale=20.0)
        seq_len = 128 if attention == "flex" else None
        row, changed = (
            step_logits(model, pack("TRN-03", name, seq_len=seq_len), step)
            for name in ("row", "row_future_changed")
        )
        for k in range(K):
            differs = (row[k] - changed[k])[: length - k].abs().amax(dim=-1) > case["tolerance_fp32"]
            assert int(differs.nonzero()[0]) == case["first_changed_aligned_position"][f"step_{k}"]
        by_attention[attention] = [logits[: length - k] for k, logits in enumerate(row)]
    for attention in ("sdpa", "flex"):
        for ours, theirs in zip(by_attention[attention], by_attention["eager"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_trn_06_padding_changes_neither_loss_nor_gradient(
    facts: VerifierFacts, edge: EdgeWeights, step: Step
) -> None:
    model = make(facts, edge, scale=20.0)
    reference, gradients = run(model, pack("TRN-06", "row"), step)
    for size in expected("TRN-06")["pad_to"]:
        output, padded = run(model, pack("TRN-06", "row", seq_len=size), step)
        torch.testing.assert_close(output.loss_sums, reference.loss_sums, rtol=0, atol=1e-6)
        assert torch.equal(output.num_supervised, reference.num_supervised)
        for name in gradients:
            torch.testing.assert_close(padded[name], gradients[name], rtol=1e-5, atol=1e-6)


def test_nan_at_an_unsupervised_target_stays_there(
    facts: VerifierFacts, edge: EdgeWeights, step: Step
) -> None:
    model, batch = make(facts, edge, scale=20.0), pack("TRN-06", "row", seq_len=16)
    clean, gradients = run(model, batch, step)
    masked = batch["loss_mask"][0] == 0
    assert 0 < int(masked.sum()) < 16
    batch["verifier_last_hidden_states"][0, masked] = torch.nan
    output, with_nan = run(model, batch, step)
    assert torch.equal(output.loss_sums, clean.loss_sums)
    assert all(torch.equal(with_nan[name], gradients[name]) for name in gradients)


def test_trn_07_rows_without_supervision_add_nothing(
    facts: VerifierFacts, edge: EdgeWeights, step: Step
) -> None:
    model = make(facts, edge)
    output, gradients = run(model, pack("TRN-07", "hs_0", "hs_1"), step)
    assert output.loss_sums.tolist() == [expected("TRN-07")["batch_[0,1]"]["loss"]] * K
    assert output.num_supervised.tolist() == [0] * K
    assert all(not g.any() for g in gradients.values())
    beside, with_row = run(model, pack("TRN-07", "hs_0", "hs_2"), step)
    alone, of_row = run(model, pack("TRN-07", "hs_2"), step)
    torch.testing.assert_close(beside.loss_sums, alone.loss_sums, rtol=0, atol=1e-6)
    for name in of_row:
        torch.testing.assert_close(with_row[name], of_row[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", TrainingStep)
def test_trn_10_the_divergence_is_computed_in_fp32(step: TrainingStep) -> None:
    case, tensors = expected("TRN-10"), load_file(CASES / "TRN-10" / "logits.safetensors")
    logits, targets = tensors["draft_logits"], tensors["teacher_logits"]
    assert logits.dtype == torch.bfloat16
    if step is TrainingStep.reference:
        leaf = logits[None].requires_grad_()
        loss = token_loss(LossConfig())(leaf, targets[None]).sum()
        gradient = torch.autograd.grad(loss, leaf)[0][0]
    else:
        losses, made, _ = loss_and_gradient(LossConfig(), compiled=False)(
            logits, targets, torch.arange(len(logits)), torch.ones(len(logits))
        )
        assert made is not None
        loss, gradient = losses.sum(), made
    assert loss.item() == pytest.approx(case["kl_sum_fp64"], rel=1e-4)
    exact = tensors["kl_gradient_fp64"]
    assert float((gradient.double() - exact).norm() / exact.norm()) < 0.005


def test_trn_15_true_tokens_are_fed_while_training_and_verifier_ids_while_drafting(
    facts: VerifierFacts, edge: EdgeWeights, recorder: LossRecorder
) -> None:
    case = expected("TRN-15")
    own = case["own_predictions"]
    model = make(facts, edge, ids=own["selected_target_ids"], scale=20.0)
    fed: list[list[int]] = []
    model.embed_tokens.register_forward_pre_hook(lambda _, args: fed.append(args[0].flatten().tolist()))
    length = len(case["row_ids"]) - 1
    g = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.tensor([case["row_ids"][1:]]),
        "hidden_states": torch.randn(1, length, 96, generator=g),
        "verifier_last_hidden_states": torch.randn(1, length, 32, generator=g),
        "loss_mask": torch.ones(1, length),
        "document_ids": torch.zeros(1, length, dtype=torch.int64),
        "position_ids": torch.arange(1, length + 1)[None],
    }
    ttt_forward(model, batch, K, recorder)
    wanted = case["teacher_forced"]
    names = ("step_0_input_ids_at_position_0_4", "step_1", "step_2")
    assert [ids[:5] for ids in fed] == [wanted[name] for name in names]

    vocabulary = vocabulary_of(model)
    reached = vocabulary.to_verifier(torch.tensor(own["draft_argmax"])).tolist()
    assert reached == own["ids_that_reach_the_embedding"]
    fed.clear()
    drafter = ChainDrafter(model)
    drafter.extend(batch["hidden_states"][0], batch["input_ids"][0])
    chain = drafter.propose(4)
    assert [ids[0] for ids in fed[1:]] == chain[:-1]
    assert set(chain) <= set(own["selected_target_ids"])


def test_trn_19_later_steps_see_the_past_and_their_own_column(
    facts: VerifierFacts, edge: EdgeWeights, recorder: LossRecorder
) -> None:
    case = expected("TRN-19")
    model, batch = make(facts, edge, scale=20.0), pack("TRN-19", "row")
    embeddings: list[Tensor] = []
    positions: list[list[int]] = []

    def track(_module: Any, _args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    model.embed_tokens.register_forward_hook(track)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    model.rotary_emb.register_forward_pre_hook(lambda _, args: positions.append(args[1][0].tolist()))
    ttt_forward(model, batch, K, recorder)
    assert positions == case["example_positions_if_first_is_1"]
    for k in range(K):
        for entry in case["visible"][f"step_{k}"]:
            t = entry["position"]
            sources = torch.autograd.grad(logits[k][t, 0], embeddings[: k + 1], retain_graph=True)
            rows = [g[0].abs().amax(dim=-1).nonzero()[:, 0].tolist() for g in sources]
            assert rows[0] == entry["step_0_keys"]
            assert rows[1:] == [[t] for _ in entry["own_column_of_steps"]]


def counts_of(pairs: dict[str, int], size: int = 264) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64)
    for token, count in pairs.items():
        counts[int(token)] = count
    return counts


def test_voc_01_d2t_holds_offsets() -> None:
    case = expected("VOC-01")
    counts = counts_of(json.loads((CASES / "VOC-01" / "counts.json").read_text()))
    vocabulary = DraftVocabulary.from_counts(counts, case["draft_vocab_size"])
    assert vocabulary.verifier_ids.tolist() == case["selected_sorted"]
    assert vocabulary.d2t.tolist() == case["d2t_offsets"]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == case["t2d_true_at"]
    assert vocabulary.t2d.numel() == case["t2d_length"]
    assert vocabulary.to_verifier(torch.tensor(3)) == case["draft_index_3_means_target"]
    with_end = DraftVocabulary.from_counts(counts, 4, always_keep=[258])
    assert with_end.verifier_ids.tolist() == [2, 5, 100, 258]


def test_voc_03_the_mapping_of_a_saved_draft_is_kept(
    facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    saved = json.loads((CASES / "VOC-03" / "checkpoint_mapping.json").read_text())["selected"]
    export_draft(make(facts, edge, ids=saved), tmp_path / "draft", {})
    loaded: Any = load_draft(tmp_path / "draft", facts, edge)
    assert vocabulary_of(loaded).verifier_ids.tolist() == saved
    assert edge.head is not None
    assert torch.equal(loaded.lm_head.weight, edge.head[torch.tensor(saved)])
    counts = counts_of(json.loads((CASES / "VOC-03" / "new_data_counts.json").read_text()))
    assert not vocabulary_of(loaded).same_as(DraftVocabulary.from_counts(counts, len(saved)))


def test_voc_05_a_token_outside_the_draft_vocabulary_is_never_right() -> None:
    case = expected("VOC-05")
    vocabulary = DraftVocabulary.from_ids(case["draft_vocab"], 10)
    truth = torch.tensor(case["target_top1_full_vocab"])
    drafted = vocabulary.to_draft(torch.tensor([case["draft_top1"]]))
    size = truth.numel()
    counts = correct_over_full_vocabulary(
        drafted, vocabulary, truth, torch.zeros(size, dtype=torch.int64), torch.ones(size)
    )
    assert int(counts.correct[0]) / int(counts.totals[0]) == case["reported_accuracy_must_be"]
    assert vocabulary.coverage_of(truth) == pytest.approx(case["coverage_to_report"])


def test_voc_06_the_maps_have_the_models_vocabulary_size() -> None:
    case = expected("VOC-06")
    padded = read_facts(CASES / "_shared" / case["shared_target"])
    assert padded.vocab_size == case["model_vocab_size"]
    counts = torch.zeros(padded.vocab_size, dtype=torch.int64)
    counts[: case["tokenizer_length"] : 40] = 1
    vocabulary = DraftVocabulary.from_counts(counts, 100)
    assert vocabulary.t2d.numel() == case["t2d_length"]
    assert int(vocabulary.verifier_ids.max()) < case["mapping_ids_below"]
    cfg = DraftConfig(name="case")
    model: Any = build_draft(
        cfg, padded, load_edge_weights(padded), vocabulary, (2, 4, 5), attention="sdpa", seed=0
    )
    assert model.t2d.numel() == case["t2d_length"]


def test_voc_07_a_short_selection_is_filled_and_counted(
    facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    case = expected("VOC-07")
    size = case["ask"]["draft_vocab_size"]
    counts = counts_of(json.loads((CASES / "VOC-07" / "counts.json").read_text()))
    vocabulary = DraftVocabulary.from_counts(counts, size)
    assert vocabulary.verifier_ids.tolist() == case["either"]["selected"]
    assert vocabulary.num_filled == size - case["distinct_tokens_in_data"]
    export_draft(make(facts, edge, ids=case["either"]["selected"]), tmp_path / "draft", {})
    config, tensors = read_export(tmp_path / "draft")
    sizes = {int(tensors["t2d"].sum()), len(tensors["d2t"]), len(tensors["lm_head.weight"])}
    assert sizes == {size} == {config["draft_vocab_size"]}


@pytest.fixture(scope="module")
def served(facts: VerifierFacts, edge: EdgeWeights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the shapes of EXP-01 and EXP-05: hidden 32, 3 slots, 4 of 264 tokens."""
    directory = tmp_path_factory.mktemp("exp") / "draft"
    export_draft(make(facts, edge, ids=[2, 5, 100, 263]), directory, {})
    return directory


def laid_over(served: Path, case_file: Path, target: Path, known: set[str]) -> Path:
    """The export with its tensors replaced by the case's; those of `known` the case lacks are removed."""
    target.mkdir()
    tensors, case = load_file(served / "model.safetensors"), load_file(case_file)
    kept = {k: v for k, v in tensors.items() if k not in known or k in case}
    save_file({**kept, **case}, target / "model.safetensors")
    (target / "config.json").write_bytes((served / "config.json").read_bytes())
    return target


def problems_of(directory: Path) -> list[Problem]:
    try:
        read_export(directory)
    except IntegrityError as error:
        return list(error.problems[1:])
    return []


def text_of(problems: list[Problem]) -> str:
    return " | ".join(map(str, problems))


EXP_01_FAULTS = {
    "good_shapes": None,
    "nan_embed": "embed_tokens.weight is not finite",
    "no_lm_head": "lm_head.weight is missing",
    "no_d2t": "d2t is missing; expected shape (4,): 4 of 264 tokens",
    "zero_fc": "fc.weight is all zero",
    "d2t_absolute": "index 3 + 263 = 266 lies outside the verifier's vocabulary of 264",
}


@pytest.mark.parametrize("name", EXP_01_FAULTS)
def test_exp_01_a_broken_file_never_passes_as_a_draft(name: str, served: Path, tmp_path: Path) -> None:
    assert name in expected("EXP-01")["export_check"]
    known = set(load_file(CASES / "EXP-01" / "good_shapes.safetensors"))
    found = problems_of(laid_over(served, CASES / "EXP-01" / f"{name}.safetensors", tmp_path / "d", known))
    wanted = EXP_01_FAULTS[name]
    assert len(found) == (wanted is not None), found
    assert wanted is None or wanted in text_of(found)


def test_exp_01_the_frozen_embedding_is_the_verifiers_bit_for_bit(served: Path, edge: EdgeWeights) -> None:
    config, tensors = read_export(served)
    assert edge.embedding is not None
    assert torch.equal(tensors["embed_tokens.weight"], edge.embedding)
    assert {str(t.dtype) for t in tensors.values() if t.is_floating_point()} == {f"torch.{config['dtype']}"}


@pytest.mark.parametrize("name", ["config_good", "config_missing_ids", "config_nested_ids"])
def test_exp_02_the_layer_ids_are_where_an_engine_reads_them(
    name: str, facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    trained = expected("EXP-02")["trained_ids"]
    model = make(facts, edge, ids=[2, 5, 100, 263], aux=tuple(trained), norm_before_residual=False)
    export_draft(model, tmp_path / "draft", {})
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("eagle_aux_hidden_state_layer_ids") == trained
    path.write_text(json.dumps({**config, **json.loads((CASES / "EXP-02" / f"{name}.json").read_text())}))
    found = problems_of(tmp_path / "draft")
    if name == "config_good":
        assert found == []
    else:
        assert "eagle_aux_hidden_state_layer_ids is not named at the top level" in text_of(found)


EXP_05_FAULTS = {
    "good": [],
    "fc_for_two_slots": ["fc.weight has another shape: (32, 64); expected (32, 96)"],
    "head_full_vocab": ["lm_head.weight has another shape: (264, 32); expected (4, 32)"],
    "hidden_64": ["fc.weight has another shape: (64, 192)", "lm_head.weight has another shape: (4, 64)"],
}


@pytest.mark.parametrize("name", EXP_05_FAULTS)
def test_exp_05_every_shape_that_does_not_fit_is_named(name: str, served: Path, tmp_path: Path) -> None:
    assert name in expected("EXP-05")
    found = problems_of(laid_over(served, CASES / "EXP-05" / f"{name}.safetensors", tmp_path / "d", set()))
    assert len(found) == len(EXP_05_FAULTS[name]), found
    for wanted in EXP_05_FAULTS[name]:
        assert wanted in text_of(found)
