"""The verifier answers user turns itself and its answers become a store; proof that the stored ids are these.

python benchmarks/regenerate.py --out benchmarks/results/regenerate_h200.json
python benchmarks/regenerate.py --hardware cpu --conversations 3 --max-new-tokens 32

Exits with 1 when a stored token is not the generated one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from common import ROOT, write_results

from eagle3lab.store.answers_check import check_answers
from eagle3lab.store.identity import ids_sha256
from eagle3lab.store.reader import StoreReader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/regenerate_h200.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--conversations", type=int, nargs="+", default=[50], help="one run and row for each")
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("overrides", nargs="*", help="more words for extract.py")
    arguments = parser.parse_args()

    rows, notes, wrong = [], [], False
    for number in arguments.conversations:
        store = arguments.work / f"regenerated-{number}"
        shutil.rmtree(store, ignore_errors=True)
        command = [
            sys.executable, "extract.py", f"model={arguments.model}", f"hardware={arguments.hardware}",
            "data.regenerate=true", f"data.max_conversations={number}", "data.max_tokens=null",
            f"data.max_len={arguments.max_len}", f"data.sampling.max_new_tokens={arguments.max_new_tokens}",
            f"store={store}", *arguments.overrides,
        ]  # fmt: skip
        print("$", " ".join(command[1:]), flush=True)
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True)
        whole = time.perf_counter() - start
        log = json.loads((store / "logs/extract.json").read_text())["runs"][-1]
        proof = check_answers(StoreReader(store, verify="full"))
        print(f"as `store verify` proves it: {proof}", flush=True)
        found = compare_by_hand(store)
        faults = found.pop("differing_tokens") + found.pop("unanswered_spans") + found.pop("left_over")
        wrong |= faults > 0
        seconds = log["seconds"]["generate"]
        rows.append(
            {
                "backend": json.loads((store / "manifest.json").read_text())["engine"]["name"],
                "conversations": number,
                "answers": proof.num_answers,
                "generated_tokens": found["generated_tokens"],
                "generate_seconds": round(seconds, 3),
                "generated_tok_s": round(found["generated_tokens"] / seconds, 1),
                "ended_share": round(proof.num_ended / proof.num_answers, 4),
                "stored_are_generated": faults == 0,
            }
        )
        notes.append({"conversations": number, "whole_command_seconds": round(whole, 3), **found, "log": log})
        print(rows[-1], flush=True)
    write_results(arguments.out, rows, notes={"runs": notes})
    if wrong:
        sys.exit("stored tokens are not the generated ones")


def compare_by_hand(store: Path) -> dict[str, float]:
    """Every supervised token of the shards against `answers.jsonl`, read here line by line and cut by length.

    It shares the hash of a prompt with the check of `store verify`, and no other code.
    """
    lines = [json.loads(line) for line in (store / "answers.jsonl").read_text().splitlines()[1:]]
    generated = {(line["conversation"], line["prompt_sha256"]): line["token_ids"] for line in lines}
    reader = StoreReader(store)
    differing = unanswered = compared = 0
    used: Counter[tuple[str, str]] = Counter()
    for i, record in enumerate(reader.rows):
        row = reader.read(i)
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        place = 0
        while place < len(ids):
            if not mask[place]:
                place += 1
                continue
            key = (record.conversation_id, ids_sha256(ids[:place]))
            if key not in generated:
                unanswered += 1
                place += 1
                continue
            used[key] += 1
            for offset, token in enumerate(generated[key]):
                at = place + offset
                compared += 1
                differing += at >= len(ids) or not mask[at] or ids[at] != token
            place += len(generated[key])
    empty = {key for key, ids in generated.items() if len(ids) == 1}
    lengths = [len(line["token_ids"]) for line in lines]
    return {
        "generated_tokens": sum(lengths),
        "compared_tokens": compared,
        "differing_tokens": differing,
        "unanswered_spans": unanswered,
        "left_over": len(set(generated) - set(used) - empty),
        "median_answer_tokens": statistics.median(lengths),
        "longest_answer_tokens": max(lengths),
    }


if __name__ == "__main__":
    main()
