from __future__ import annotations

import json

import pytest

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.evaluate.overlap import check_overlap
from eagle3lab.evaluate.prompts import Prompt, read_prompts
from eagle3lab.rows.files import read_file
from eagle3lab.store.files import sha256_of
from eagle3lab.store.trained_on import TRAINED_ON_FILE, TrainedOn, text_key, trained_on, write_trained_on


class Row:
    """A training row of the ids 1 2 3 with the answer 4 5."""

    row_id = conversation_id = source = "row"
    split = "train"
    input_ids = (1, 2, 3, 4, 5)
    loss_mask = (0, 0, 0, 1, 1)


def rendered(*texts_and_ids):
    prompts = []
    for number, (text, ids) in enumerate(texts_and_ids):
        messages = ({"role": "system", "content": "seen text"}, {"role": "user", "content": text})
        prompts.append((Prompt(f"p/{number}", "c", messages, 0), ids))
    return prompts


@pytest.fixture
def draft(tmp_path):
    """A draft directory that was trained on one conversation."""
    write(tmp_path, trained_on([Row()], [text_key("Seen text?")]))
    return tmp_path


def write(directory, keys):
    write_trained_on(directory / TRAINED_ON_FILE, keys)
    recorded = {TRAINED_ON_FILE: {"sha256": sha256_of(directory / TRAINED_ON_FILE)}}
    (directory / "provenance.json").write_text(json.dumps(recorded))


SET = PromptsConfig(name="set")


def test_prompts_that_were_never_seen_pass_without_a_word(draft):
    prompts = rendered(("seen text", [1, 2]), ("other", [1, 2, 3, 4]), ("see seen text?", [1]))
    kept, overlap = check_overlap(draft, prompts, SET)
    assert kept == prompts
    assert (overlap.note, overlap.left_out) == (None, {})
    assert overlap.compared == ("served prompt", "user text")


@pytest.mark.parametrize("seen", [("  SEEN\ntext? ", [9]), ("another text", [1, 2, 3])])
def test_a_seen_text_under_any_template_or_a_seen_prompt_of_any_text_is_refused(draft, seen):
    with pytest.raises(UserError) as caught:
        check_overlap(draft, rendered(("new", [7]), seen, ("new too", [8])), SET)
    text = str(caught.value)
    assert "was trained on 1 of the 3 prompts of set: 'p/1'" in text
    assert "prompts.leave_out_trained_on=true" in text
    assert "prompts=ANOTHER" in text
    assert caught.value.exit_code == 2


def test_of_many_the_first_are_named(draft):
    with pytest.raises(UserError, match=r"on 7 of the 8 .*'p/0, p/1, p/2, p/3, p/4, \.\.\.'"):
        check_overlap(draft, rendered(*[("seen text?", [9])] * 7, ("new", [7])), SET)


def test_they_can_be_left_out_and_are_counted(draft):
    prompts = rendered(("new", [7]), ("seen text?", [9]), ("new too", [8]))
    kept, overlap = check_overlap(draft, prompts, PromptsConfig(name="set", leave_out_trained_on=True))
    assert [prompt.prompt_id for prompt, _ in kept] == ["p/0", "p/2"]
    assert overlap.left_out == {"trained_on": ["p/1"]}
    assert "1 of 3 prompts are left out" in str(overlap.note)


def test_nothing_left_is_refused_also_then(draft):
    with pytest.raises(UserError, match="on 1 of the 1 prompts") as caught:
        check_overlap(
            draft, rendered(("seen text?", [9])), PromptsConfig(name="set", leave_out_trained_on=True)
        )
    assert "leave_out" not in str(caught.value)


@pytest.mark.parametrize(("recorded", "why"), [(True, "is gone"), (False, "made elsewhere")])
def test_a_draft_without_keys_says_that_nothing_could_be_checked(draft, recorded, why):
    (draft / TRAINED_ON_FILE).unlink()
    if not recorded:
        (draft / "provenance.json").unlink()
    prompts = rendered(("seen text?", [9]))
    kept, overlap = check_overlap(draft, prompts, SET)
    assert (kept, overlap.compared) == (prompts, ())
    assert "could not be checked" in str(overlap.note)
    assert why in str(overlap.note)


def test_a_draft_of_an_imported_store_is_checked_by_ids_and_says_so(draft):
    write(draft, TrainedOn(trained_on([Row()], None).served_prompts, None))
    _, overlap = check_overlap(draft, rendered(("seen text?", [9])), SET)
    assert overlap.compared == ("served prompt",)
    assert "by their token ids alone" in str(overlap.note)
    with pytest.raises(UserError, match="was trained on 1 of the 1"):
        check_overlap(draft, rendered(("new", [1, 2, 3])), SET)


def test_damaged_keys_are_refused(draft):
    file = draft / TRAINED_ON_FILE
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # still sorted keys: only the recorded sum can tell
    with pytest.raises(IntegrityError, match=r"trained_on\.keys is damaged"):
        check_overlap(draft, rendered(("new", [7])), SET)


@pytest.mark.parametrize("folder", ["demo", "tiny_chat"])
def test_the_shipped_prompts_are_in_no_shipped_conversation(folder, draft):
    conversations = read_file(f"asset:{folder}/conversations.jsonl.xz")
    said = {text_key(m["content"]) for c in conversations for m in c.value["messages"] if m["role"] == "user"}
    write(draft, trained_on([], said))
    shipped = read_prompts(PromptsConfig(name="demo", path=f"asset:{folder}/prompts.jsonl"))
    kept, overlap = check_overlap(draft, [(prompt, []) for prompt in shipped], SET)
    assert len(kept) == len(shipped) >= 12
    assert overlap.note is None
