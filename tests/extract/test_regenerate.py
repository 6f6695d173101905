"""`data.regenerate` through the pipeline: a scripted engine for what can go wrong, and the tiny verifier itself."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import DataConfig, ExtractorConfig, HardwareConfig, ModelConfig, SamplingConfig
from eagle3lab.engines.base import Answer, EngineDied
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract import regenerate
from eagle3lab.extract.pipeline import extract_store
from eagle3lab.store.answers import read_answers, require_answers
from eagle3lab.store.answers_check import check_answers
from eagle3lab.store.claim import claimed
from eagle3lab.store.files import sha256_of
from eagle3lab.store.manifest import read_manifest, write_manifest
from eagle3lab.store.merge import merge_parts
from eagle3lab.store.reader import StoreReader

SHARED = Path(__file__).parent.parent / "cases" / "_shared"
END = 258
NUM = 12


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Every third one has two user turns; one has none; the last is a copy of the first."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    records = []
    for i in range(NUM):
        turns = [("user", f"question {i}"), ("assistant", "-")]
        turns += [("user", "and then?"), ("assistant", "-")] * (i % 3 == 0)
        records.append({"id": f"c{i}", "messages": [{"role": r, "content": c} for r, c in turns]})
    records.insert(5, {"id": "mute", "messages": [{"role": "assistant", "content": "-"}]})
    records.append({**records[0], "id": "copy"})
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


class Scripted:
    """Answers that depend on prompt and seed alone; `script` may replace one or fail."""

    name = "scripted"

    def __init__(self, script=None, at_once=4):
        self.answers_at_once, self.script = at_once, script
        self.calls = self.closed = 0
        self.asked = Counter()

    def versions(self):
        return {"version": "1"}

    def answer(self, prompts, sampling, seeds, max_new_tokens):
        self.calls += 1
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            self.asked[tuple(prompt)] += 1
            text = bytes(b for b in prompt if b < 128).decode()
            answer = self.script(self, text) if self.script else None
            answers.append(answer or Answer((*f"{seed % 97} to that".encode(), END), True))
        return answers

    def close(self):
        self.closed += 1


@pytest.fixture
def scripted(monkeypatch):
    """Make the generating engine a scripted one; returns it."""

    def use(script=None, at_once=4):
        engine = Scripted(script, at_once)
        monkeypatch.setattr(regenerate, "build_answerer", lambda *_: engine)
        return engine

    return use


def extract(store, data, *, said=None, extract_options=None, **options):
    defaults = {"validation_share": 0.5, "max_len": 120, "regenerate": True}
    sampling = SamplingConfig(max_new_tokens=12) if options.get("regenerate", True) else SamplingConfig()
    return extract_store(
        model=ModelConfig(
            name="target_tiny", path=str(SHARED / "target_tiny"), tokenizer=str(SHARED / "tok_bytes"),
            template=str(SHARED / "templates" / "plain.jinja"),
        ),
        data=DataConfig(name="test", paths=[str(data)], **{"sampling": sampling, **defaults, **options}),
        extract=ExtractorConfig(**{"shard_tokens": 150, "batch_tokens": 160, **(extract_options or {})}),
        hardware=HardwareConfig(name="cpu"),
        store=store,
        console=Console(file=said or io.StringIO()),
    )  # fmt: skip


def tree(store):
    files = [p for p in sorted(store.rglob("*")) if p.is_file() and "logs" not in p.parts]
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def whole(conversations, tmp_path_factory):
    """The store of the scripted engine, made in one go."""
    store = tmp_path_factory.mktemp("whole") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "build_answerer", lambda *_: Scripted())
        extract(store, conversations)
    return store


def test_rows_are_generated_ids_and_the_manifest_says_how(whole, conversations, tmp_path):
    reader = StoreReader(whole, verify="full")
    proof = check_answers(reader)
    assert (proof.num_answers, proof.num_ended, proof.num_spans) == (16, 16, 18)  # the copy's two stand twice
    settings = reader.manifest.row_settings
    assert settings["regenerated"] is True
    assert settings["sampling"] == {
        "temperature": 0.7, "top_p": 0.95, "top_k": 0, "max_new_tokens": 12, "seed": 0, "stop_token_ids": [END],
    }  # fmt: skip
    assert len(settings["sampling_hash"]) == 64
    assert settings["generated_by"] == {"name": "scripted", "version": "1"}
    account = reader.manifest.accounting
    assert account["read"] == account["kept"] + sum(account["dropped"].values()) == NUM + 2
    assert account["dropped"] == {"no_user_turn": 1}
    assert account["repaired"] == {"answers_replaced": 18}
    extract(tmp_path / "given", conversations, regenerate=False)
    given = {row.conversation_id: row.split for row in StoreReader(tmp_path / "given").rows}
    assert {row.conversation_id: row.split for row in reader.rows}.items() <= given.items()
    assert set(given.values()) == {"train", "validation"}


def test_the_report_says_what_was_generated(conversations, tmp_path, scripted):
    scripted(lambda _engine, text: Answer((65,) * 12, False) if "question 7" in text else None)
    said = io.StringIO()
    report = extract(tmp_path / "store", conversations, said=said)
    text = said.getvalue()
    assert "answers: 16 generated, " in text
    assert "93.8% ended by themselves, 1 were cut, 0 are empty; 13 rows" in text
    assert "cut_at_max_new_tokens 1" in text
    assert report.seconds["generate"] > 0
    log = json.loads((tmp_path / "store" / "logs" / "extract.json").read_text())["runs"][0]
    assert (log["generated"]["num_answers"], log["generated"]["num_ended"]) == (16, 15)


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_the_store_does_not_depend_on_how_many_are_asked_at_once(
    conversations, tmp_path, scripted, at_once, max_tokens
):
    scripted(at_once=5)
    extract(tmp_path / "five", conversations, max_tokens=max_tokens)
    engine = scripted(at_once=at_once)
    extract(tmp_path / "store", conversations, max_tokens=max_tokens)
    assert tree(tmp_path / "store") == tree(tmp_path / "five")
    assert engine.closed == 1
    assert set(engine.asked.values()) == {1}  # the copy's prompts are not asked again
    manifest = read_manifest(tmp_path / "store")
    assert ("beyond_max_tokens" in manifest.accounting["dropped"]) == (max_tokens is not None)
    if max_tokens is not None:
        assert max_tokens <= manifest.num_tokens < max_tokens + 120


def test_a_complete_store_asks_no_engine(whole, conversations, monkeypatch):
    monkeypatch.setattr(regenerate, "build_answerer", lambda *_: pytest.fail("an engine was started"))
    before = tree(whole)
    report = extract(whole, conversations)
    assert report.already_complete
    assert "answers: 16 were there; 13 rows; nothing to capture" in report.describe()
    assert tree(whole) == before


@pytest.mark.parametrize("kill_after", [0, 1, 3])
@pytest.mark.parametrize("died", [False, True])
def test_interrupted_and_resumed_gives_the_same_bytes(
    whole, conversations, tmp_path, scripted, kill_after, died
):
    def die(engine, _text):
        if engine.calls > kill_after:
            raise EngineDied("gone") if died else KeyboardInterrupt

    scripted(die)
    with pytest.raises(UserError if died else KeyboardInterrupt, match="gone" if died else None):
        extract(tmp_path / "store", conversations)
    known = read_answers(tmp_path / "store")
    assert known is not None
    assert len(known.by_key) == 4 * kill_after
    with open(tmp_path / "store" / "answers.jsonl", "ab") as file:  # as a kill inside a write leaves it
        file.write(b'{"conversation":"12')
    engine, said = scripted(at_once=3), io.StringIO()
    extract(tmp_path / "store", conversations, said=said)
    assert "cut the last line of answers.jsonl" in said.getvalue()
    assert sum(engine.asked.values()) == 16 - 4 * kill_after
    assert tree(tmp_path / "store") == tree(whole)


def test_a_kill_of_the_real_verifier_costs_no_byte(conversations, tmp_path, monkeypatch):
    extract(tmp_path / "whole", conversations)
    answer, calls = HuggingFaceEngine.answer, []

    def interrupted(self, *request):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(self, *request)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract(tmp_path / "store", conversations)
    monkeypatch.setattr(HuggingFaceEngine, "answers_at_once", 3)
    extract(tmp_path / "store", conversations)
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")
    answers = require_answers(tmp_path / "store").by_key.values()
    assert any(not answer.ended for answer in answers)  # a random verifier rarely ends by itself
    check_answers(StoreReader(tmp_path / "store"))


def test_a_failed_call_is_asked_again_one_by_one(whole, conversations, tmp_path, scripted):
    def fail_once(engine, _text):
        if engine.calls == 2:
            raise RuntimeError("hiccup")

    scripted(fail_once)
    extract(tmp_path / "store", conversations)
    assert tree(tmp_path / "store") == tree(whole)


BAD = {
    "fails": RuntimeError("no answer"),
    "stop inside": Answer((65, END, 65), False),
    "no such token": Answer((264, END), True),
    "too many": Answer((65,) * 13, False),
    "too few": Answer((65,) * 3, False),
    "no token": Answer((), False),
}


@pytest.mark.parametrize("kind", BAD)
def test_conversations_that_the_engine_fails_on_are_named_and_tried_again(
    whole, conversations, tmp_path, scripted, kind
):
    def fail(_engine, text):
        if "question 4" in text or "question 10" in text:
            if isinstance(BAD[kind], Exception):
                raise BAD[kind]
            return BAD[kind]
        return None

    engine = scripted(fail)
    with pytest.raises(
        UserError, match=r"2 of 14 conversations are not answered \(engine_failed\)"
    ) as caught:
        extract(tmp_path / "store", conversations)
    assert "conversations.jsonl:5" in str(caught.value)
    assert "conversations.jsonl:12" in str(caught.value)
    assert max(engine.asked.values()) == 3
    log = json.loads((tmp_path / "store" / "logs" / "extract.json").read_text())["runs"][0]
    assert len(log["lost"]) == 2
    engine = scripted()
    extract(tmp_path / "store", conversations)
    assert len(engine.asked) == 2  # the two that were lost, and nothing else
    assert tree(tmp_path / "store") == tree(whole)


def test_an_engine_that_answers_nothing_is_given_up(conversations, tmp_path, scripted):
    def fail(_engine, _text):
        raise RuntimeError("broken")

    engine = scripted(fail, at_once=1)
    with pytest.raises(UserError, match="3 of 14 conversations are not answered"):
        extract(tmp_path / "store", conversations)
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": SamplingConfig(max_new_tokens=12, temperature=1.0)}, r"sampling\.temperature: 0\.7"),
        ({"sampling": SamplingConfig(max_new_tokens=12, seed=3)}, r"sampling\.seed: 0"),
        ({"max_len": 100}, "max_len: 120"),
        ({"max_tokens": 200}, "max_tokens"),
        ({"max_conversations": 3}, "num_conversations: 14"),
        ({"regenerate": False}, r"begun with data\.regenerate=true"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_answers_made_otherwise_are_refused_by_name(
    whole, conversations, tmp_path, monkeypatch, change, named, complete
):
    store = whole
    if not complete:
        store = tmp_path / "store"
        store.mkdir()
        (store / "answers.jsonl").write_bytes((whole / "answers.jsonl").read_bytes())
    monkeypatch.setattr(regenerate, "build_answerer", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(UserError, match=named):
        extract(store, conversations, **change)


def test_a_store_of_given_answers_is_not_regenerated_into(conversations, tmp_path, scripted):
    extract(tmp_path / "store", conversations, regenerate=False)
    scripted()
    with pytest.raises(UserError, match=r"begun with data\.regenerate=false; expected data\.regenerate=true"):
        extract(tmp_path / "store", conversations)


def test_half_of_the_answers_by_another_engine_are_refused(conversations, tmp_path, scripted):
    def die(engine, _text):
        if engine.calls > 1:
            raise KeyboardInterrupt

    scripted(die)
    with pytest.raises(KeyboardInterrupt):
        extract(tmp_path / "store", conversations)
    other = scripted()
    other.versions = lambda: {"version": "2"}
    with pytest.raises(UserError, match=r"another engine\.version: '1'; expected '2' as now"):
        extract(tmp_path / "store", conversations)
    assert other.closed == 1


def copy_of(whole, tmp_path):
    store = tmp_path / "copy"
    for name, data in tree(whole).items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(data)
    return store


def change_token(store):
    """Change one token of one answer; returns that answer as it was."""
    lines = (store / "answers.jsonl").read_text().splitlines()
    line = json.loads(lines[4])
    line["token_ids"][2] ^= 1
    lines[4] = json.dumps(line, separators=(",", ":"))
    (store / "answers.jsonl").write_text("\n".join(lines) + "\n")
    return line


def test_a_changed_token_in_the_answers_is_named(whole, conversations, tmp_path):
    store = copy_of(whole, tmp_path)
    line = change_token(store)
    with pytest.raises(IntegrityError, match=r"answers\.jsonl: sha256"):
        StoreReader(store)
    with pytest.raises(IntegrityError, match=r"answers\.jsonl: sha256"):
        extract(store, conversations)
    manifest = read_manifest(store)  # as somebody would leave it who keeps the checksums right
    digests = {**manifest.checksums, "answers.jsonl": sha256_of(store / "answers.jsonl")}
    write_manifest(store, replace(manifest, checksums=digests))
    reader = StoreReader(store, verify="full")
    (row,) = [r for r in reader.rows if r.conversation_id == line["conversation"]][:1]
    with pytest.raises(IntegrityError, match=rf"row {row.row_id[:12]} .*is not the generated one") as caught:
        check_answers(reader)
    assert f"expected {line['token_ids'][2]} as in answers.jsonl" in str(caught.value)


def test_a_changed_token_in_the_store_is_named(whole, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    store = copy_of(whole, tmp_path)
    shard = store / "shards" / "00000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    with safe_open(shard, "pt") as handle:
        metadata = handle.metadata()
    at = int(tensors["loss_mask"].nonzero()[0])
    tensors["input_ids"][at] ^= 1
    save_file(tensors, shard, metadata=metadata)
    reader = StoreReader(store)
    with pytest.raises(IntegrityError, match=rf"row {reader.rows[0].row_id[:12]} .*do not hash"):
        check_answers(reader)


def test_an_answer_that_is_in_no_row_is_named(whole, tmp_path):
    store = copy_of(whole, tmp_path)
    line = json.loads((store / "answers.jsonl").read_text().splitlines()[-1]) | {
        "turn": 7,
        "prompt_sha256": "0",
    }
    with open(store / "answers.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    manifest = read_manifest(store)
    digests = {**manifest.checksums, "answers.jsonl": sha256_of(store / "answers.jsonl")}
    write_manifest(store, replace(manifest, checksums=digests))
    with pytest.raises(IntegrityError, match=r"the answer to turn 7 of conversation \w+ is in no row"):
        check_answers(StoreReader(store))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"turn":0', '"turn":"0"', 1), r"answers\.jsonl line \d+ is damaged"),
        (lambda text: text + text.splitlines()[-1] + "\n", "the same turn stands twice"),
        (lambda text: text.replace('"prompt_sha256":"', '"prompt_sha256":"f', 1), "has another prompt"),
        (lambda text: text.replace("eagle3lab-answers", "other", 1), "does not begin as a file of answers"),
    ],
)
def test_damaged_answers_are_an_integrity_error(whole, conversations, tmp_path, scripted, damage, message):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "answers.jsonl").write_text(damage((whole / "answers.jsonl").read_text()))
    scripted()
    with pytest.raises(IntegrityError, match=message):
        extract(tmp_path / "store", conversations)


def test_parts_capture_what_part_0_generated_and_join_to_the_bytes_of_one_run(
    whole, conversations, tmp_path, scripted
):
    def part(number):
        return extract(tmp_path / "store", conversations, extract_options={"part": number, "num_parts": 3})

    engine = scripted()
    with pytest.raises(UserError, match=r"extract\.part=0 first"):
        part(1)
    for number in range(3):
        part(number)
    assert sum(engine.asked.values()) == 16
    parts = [tmp_path / f"store.part{number}of3" for number in range(3)]
    assert all(require_answers(path).by_key == require_answers(whole).by_key for path in parts)
    merge_parts(parts, tmp_path / "store")
    assert tree(tmp_path / "store") == tree(whole)
    check_answers(StoreReader(tmp_path / "store", verify="full"))
    change_token(parts[1])
    manifest = read_manifest(parts[1])
    digests = {**manifest.checksums, "answers.jsonl": sha256_of(parts[1] / "answers.jsonl")}
    write_manifest(parts[1], replace(manifest, checksums=digests))
    with pytest.raises(UserError, match=r"part1of3: other answers\.jsonl"):
        merge_parts(parts, tmp_path / "again")


def test_two_runs_cannot_generate_into_one_store(conversations, tmp_path, scripted):
    scripted()
    with claimed(tmp_path / "store"), pytest.raises(UserError, match="another process is writing the store"):
        extract(tmp_path / "store", conversations)


def test_nothing_to_answer_is_an_error_without_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(regenerate, "build_answerer", lambda *_: pytest.fail("an engine was started"))
    (tmp_path / "mute.jsonl").write_text('{"messages": [{"role": "assistant", "content": "-"}]}\n')
    with pytest.raises(UserError, match="no conversation became a row"):
        extract(tmp_path / "store", tmp_path / "mute.jsonl")
