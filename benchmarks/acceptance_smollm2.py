"""Drafts for SmolLM2-135M-Instruct side by side: trained by several recipes, decoded on public prompts.

python benchmarks/acceptance_smollm2.py --out benchmarks/results/acceptance_smollm2.json --regenerate --copies 2 --parallel 8 \
    --seq-len 8192
python benchmarks/acceptance_smollm2.py --cpu --max-tokens 64000 --epochs 4 --prompts 8 --new-tokens 48 --seeds 1 \
    --seq-len 512 --parallel 1 --minutes 90 --out benchmarks/results/acceptance_smollm2_cpu.json
python benchmarks/acceptance_smollm2.py --tiny --work /tmp/tiny    # on a CPU: does it run

Every trial is `train.py` and `evaluate.py` as a user types them, over one store and one file of prompts: MT-Bench,
HumanEval and GSM8K, as many of each, in turn over their categories. Trials run side by side on the devices. The
results are written after each, so that a time limit keeps what was measured. On a GPU vLLM captures and decodes,
greedily and sampled; on a CPU the reference decoder does, greedily with three drafted tokens. A store that is there
already is used as it is.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from common import ROOT, write_results

from eagle3lab.config.schema import PromptsConfig
from eagle3lab.evaluate.prompts import read_prompts

CONVERSATIONS = ROOT / "eagle3lab/assets/demo/conversations.jsonl.xz"

SETS = ("mt_bench", "humaneval", "gsm8k")
TOKENS = (0.25, 0.5, 2.0, 4.0)  # of the run's own, each with a schedule of its own
DATA_SHARES = (0.125, 0.25, 0.5)  # with as many more epochs: equal tokens and updates


@dataclass(frozen=True)
class Trial:
    """One draft: a recipe, its seed, and where it stands on a curve."""

    variant: str
    overrides: tuple[str, ...]
    seed: int = 1
    on_curve: bool = False  # decoded with three drafted tokens and greedily alone
    tokens: float = 1.0  # of the run's own
    data_share: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"


WARM_UP = "optim.lr_warmup_updates=20"
ADAMW = ("optim=adamw", "optim.lr=1e-3", WARM_UP)
RECIPES = {
    "default": ("draft.ttt_steps=3", *ADAMW),
    # its own forward, optimizer, learning rate, window, norms and loss; packs and epochs as everywhere here
    "speculators": ("experiment=speculators_09", "draft.step=reference"),
    "default_k7": ("draft.ttt_steps=7", *ADAMW),
    "adamw_1e-4": ("draft.ttt_steps=3", "optim=adamw", "optim.lr=1e-4", WARM_UP),
}
MUON = ("draft.ttt_steps=3", "optim=muon", WARM_UP)
NORMS = ("draft.norm_before_fc=true", "draft.norm_output=true")  # EAGLE-3.1's
FURTHER = {
    "default_k7_decay0.8": ("draft.ttt_steps=7", "loss.step_decay=0.8", *ADAMW),
    "adamw_3e-3": ("draft.ttt_steps=3", "optim=adamw", "optim.lr=3e-3", WARM_UP),
    "muon_1e-2": (*MUON, "optim.lr=1e-2"),
    "muon_3e-3": (*MUON, "optim.lr=3e-3"),
    "muon_1e-2_norms": (*MUON, "optim.lr=1e-2", *NORMS),
    "adamw_1e-3_norms": ("draft.ttt_steps=3", *ADAMW, *NORMS),
    "speculators_k7": ("experiment=speculators_09", "draft.step=reference", "draft.ttt_steps=7"),
}


def trials(seeds: Sequence[int]) -> Iterator[Trial]:
    """All of them, what is wanted most first: recipes, curves, the choice by loss, their seeds, further recipes."""
    first, *others = seeds
    point = Trial("default", RECIPES["default"], first, on_curve=True)
    tokens = {share: replace(point, variant=f"default_tokens{share:g}", tokens=share) for share in TOKENS}
    yield tokens.pop(max(TOKENS))  # the longest of all
    for variant, overrides in RECIPES.items():
        yield Trial(variant, overrides, first)
    for share in DATA_SHARES:
        yield replace(point, variant=f"default_data{share:g}", data_share=share)
    least = min(DATA_SHARES)  # the most epochs over the fewest rows: here the two part, if anywhere
    by_loss = (*point.overrides, "train.select_by=loss")
    yield replace(point, variant=f"default_data{least:g}_by_loss", overrides=by_loss, data_share=least)
    yield from tokens.values()
    for seed in others:
        for variant, overrides in RECIPES.items():
            yield Trial(variant, overrides, seed)
    for seed in seeds:
        for variant, overrides in FURTHER.items():
            yield Trial(variant, overrides, seed)


class Bench:
    """Paths, limits and the rows so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.perf_counter()
        self.work: Path = arguments.work
        self.store: Path = arguments.store or self.work / "store"
        self.prompts = self.work / "prompts.jsonl"
        model = "tiny" if arguments.tiny else "smollm2_135m"
        self.on_cpu: bool = arguments.tiny or arguments.cpu
        self.words = [f"model={model}", f"hardware={'cpu' if self.on_cpu else 'h200'}"]
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {"prompts_of_each_set": arguments.prompts, "drafts": {}, "failed": {}}
        self.lock = Lock()
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else [str(i) for i in range(arguments.devices)]
        self.slots: SimpleQueue[str] = SimpleQueue()  # a device for each trial that runs
        for name in names[: arguments.devices] * arguments.parallel:
            self.slots.put(name)

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def run(self, log: str, *words: str, device: str | None = None) -> None:
        """A command in a process of its own; its output goes to a log, the end of which is shown if it fails."""
        file = self.work / "logs" / f"{log}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if device is not None:
            at_once = self.arguments.parallel * self.arguments.devices
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // at_once))
            environment["CUDA_VISIBLE_DEVICES"] = device
        with file.open("w") as output:
            process = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        if process.returncode:
            lines = file.read_text(errors="replace").splitlines()
            said = [line for line in lines if line.startswith(("error:", "    try:"))] or lines[-15:]
            raise RuntimeError("\n".join([f"{' '.join(words)} ended with {process.returncode}:", *said]))


def make_prompts(bench: Bench) -> None:
    """One file of all sets; the category of a prompt is its set."""
    lines = []
    for name in SETS:
        chosen = PromptsConfig(name=name, path=f"package:{name}", max_prompts=bench.arguments.prompts)
        for prompt in read_prompts(chosen):
            turns = [message["content"] for message in prompt.messages]
            lines.append(json.dumps({"id": prompt.prompt_id, "category": name, "turns": turns}))
    bench.prompts.write_text("\n".join(lines) + "\n")


def extract(bench: Bench) -> None:
    data = ["data=demo", f"data.max_tokens={bench.arguments.max_tokens or 'null'}"]
    data += [f"data.max_len={min(2048, bench.arguments.seq_len)}"]
    if bench.arguments.regenerate:
        data += ["data.regenerate=true", "data.sampling.temperature=0.7", "data.sampling.max_new_tokens=512"]
        data += [f"data.paths=[{copies_of_conversations(bench)}]"]
    backend = []
    if not bench.on_cpu:
        backend += ["extract.backend=vllm", "extract.batch_tokens=8192", "hardware.engine.memory_share=0.2"]
        backend += [
            "hardware.engine.cache_gib=16",
            f"hardware.engine.data_parallel={bench.arguments.devices}",
        ]
    start = bench.seconds()
    if not (bench.store / "manifest.json").is_file():
        bench.run("extract", "extract.py", *bench.words, *data, *backend, f"store={bench.store}")
    manifest = json.loads((bench.store / "manifest.json").read_text())
    kept = ("num_rows", "num_tokens", "num_supervised")
    bench.notes["store"] = {name: manifest[name] for name in kept} | {
        "recipe": " ".join(["extract.py", *bench.words, *data, *backend]).replace(f"{bench.work}/", ""),
        "seconds": round(bench.seconds() - start, 1),
    }
    print(bench.notes["store"], flush=True)


def copies_of_conversations(bench: Bench) -> Path:
    """The shipped user turns as often as wanted: another text in place of the answers makes the verifier answer anew."""
    path = bench.work / "user_turns.jsonl"
    with lzma.open(CONVERSATIONS, "rt") as shipped, path.open("w") as file:
        for line in shipped:
            messages = json.loads(line)["messages"]
            for copy in range(bench.arguments.copies):
                turns = [m if m["role"] == "user" else {**m, "content": f"{copy}"} for m in messages]
                file.write(json.dumps({"messages": turns}) + "\n")
    return path


def run_trial(bench: Bench, trial: Trial) -> None:
    """`measure` on the next free device."""
    device = bench.slots.get()
    try:
        measure(bench, trial, device)
    finally:
        bench.slots.put(device)


def measure(bench: Bench, trial: Trial, device: str) -> None:
    """Train and decode; the rows of every set go into the results."""
    arguments = bench.arguments
    if bench.seconds() > 60 * arguments.minutes:
        with bench.lock:
            bench.notes["failed"][trial.name] = "not begun: the time was over"
        return
    run_dir = bench.work / "runs" / trial.name
    common = [*bench.words, "data=demo", f"store={bench.store}"]
    train = [*common, *trial.overrides, *budget(bench, trial), f"train.seed={trial.seed}"]
    if bench.on_cpu:
        train += [f"draft.vocab_size={'null' if arguments.tiny else 6144}"]
    evaluate = [
        *bench.words, f"draft={run_dir / 'draft'}", "prompts=jsonl", "prompts.name=public",
        f"prompts.path={bench.prompts}", f"decode.max_new_tokens={arguments.new_tokens}",
        f"decode.seed={trial.seed}", f"out={run_dir / 'evaluation'}",
    ]  # fmt: skip
    if bench.on_cpu or trial.on_curve:
        evaluate += ["decode.k=[3]", "decode.temperature=[0.0]"]
    else:
        evaluate += ["decode.k=[3,7]", "decode.temperature=[0.0,1.0]"]
    if not bench.on_cpu:
        evaluate += [
            "decode.backend=vllm",
            "decode.precision=bf16",
            f"decode.batch_sizes=[{arguments.batch}]",
        ]
        # beside others that take and return memory, what is free cannot be measured
        evaluate += ["hardware.engine.memory_share=0.05", "hardware.engine.cache_gib=4"]
        evaluate += ["hardware.engine.eager=true"]  # most of an engine's start is compiling, beside others
    try:
        bench.run(f"{trial.name}-train", "train.py", *train, f"run_dir={run_dir}", device=device)
        trained = bench.seconds()
        bench.run(f"{trial.name}-evaluate", "evaluate.py", *evaluate, device=device)
    except RuntimeError as error:
        print(f"{trial.name} FAILED: {error}", flush=True)
        with bench.lock:
            bench.notes["failed"][trial.name] = str(error).replace(f"{bench.work}/", "").splitlines()[1:]
        if not (
            run_dir / "evaluation/evaluation.json"
        ).is_file():  # written where a text is not the verifier's own
            return
    summary = json.loads((run_dir / "summary.json").read_text())
    evaluation = json.loads((run_dir / "evaluation/evaluation.json").read_text())
    with bench.lock:
        bench.rows += rows_of(trial, summary, evaluation)
        bench.notes["drafts"][trial.name] = {
            "train": " ".join(["train.py", *train]).replace(f"{bench.work}/", ""),
            "simulated": evaluation["setup"]["simulated"],
            "selection": summary["selection"],
            "overall": {
                f"k{v['k']} T{v['temperature']}": v["overall"]["acceptance_length"]
                for v in evaluation["variants"]
            },
            "texts_equal": [
                [v["k"], v["num_identical"], v["num_near_ties"]]
                for v in evaluation["variants"]
                if v["temperature"] == 0
            ],
        }
        print(f"{bench.seconds():6.0f} s  {trial.name} (trained at {trained:.0f} s): "
              f"{bench.notes['drafts'][trial.name]['overall']}", flush=True)  # fmt: skip
        bench.notes["simulated_against_real"] = calibration(bench.notes["drafts"].values())
        write_results(arguments.out, bench.rows, notes=bench.notes)


def budget(bench: Bench, trial: Trial) -> list[str]:
    """Of training: the run's epochs, or as many tokens as the trial's place on a curve asks for."""
    epochs = bench.arguments.epochs * trial.tokens / trial.data_share
    words = [f"train.seq_len={bench.arguments.seq_len}", f"train.max_epochs={max(1, round(epochs))}"]
    if trial.data_share < 1:
        words += [f"train.data_share={trial.data_share:g}"]
    if epochs < 1:
        manifest = json.loads((bench.store / "manifest.json").read_text())
        words += [f"train.max_tokens={round(epochs * manifest['num_tokens'])}"]
    return words


def calibration(drafts: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Over drafts, T=0, as many drafted as trained for: correlation (Pearson) of the two lengths, real less simulated."""
    pairs = []
    for draft in drafts:
        simulated = draft["simulated"]
        real = draft["overall"].get(f"k{simulated['ttt_steps']} T0.0") if simulated else None
        if real is not None:
            pairs.append((simulated["acceptance_length"], real))
    if len(pairs) < 3:
        return {}
    simulated, real = zip(*pairs, strict=True)
    return {
        "drafts": len(pairs),
        "correlation": round(statistics.correlation(simulated, real), 4),
        "mean_bias": round(statistics.mean(r - s for s, r in pairs), 4),
        "largest_bias": round(max((r - s for s, r in pairs), key=abs), 4),
    }


def rows_of(trial: Trial, summary: dict[str, Any], evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "variant": trial.variant,
            "prompts": name,
            "k": result["k"],
            "temperature": result["temperature"],
            "seed": trial.seed,
            "acceptance_length": round(stats["acceptance_length"], 4),
            "low": round(stats["acceptance_length_low"], 4),
            "high": round(stats["acceptance_length_high"], 4),
            "speedup": round(
                result["speed_ratio"], 4
            ),  # over all prompts, eager, with others at work on the device
            "train_tokens": summary["tokens"],
            "updates": summary["updates"],
        }
        for result in evaluation["variants"]
        for name, stats in result["per_category"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/acceptance_smollm2.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench/acceptance"))
    parser.add_argument("--store", type=Path, help="where it is or is made; default: under --work")
    parser.add_argument("--prompts", type=int, default=80, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=4, help="trials side by side on each device")
    parser.add_argument("--batch", type=int, default=96, help="texts decoded together")
    parser.add_argument("--minutes", type=float, default=20.0, help="no trial is begun after these")
    parser.add_argument("--regenerate", action="store_true", help="the verifier answers the user turns anew")
    parser.add_argument("--copies", type=int, default=1, help="answers to each shipped conversation")
    parser.add_argument("--store-only", action="store_true", help="extract, train nothing")
    parser.add_argument("--only", nargs="+", help="variants, in this order")
    parser.add_argument("--max-tokens", type=int, help="of the store; default: all conversations")
    parser.add_argument("--cpu", action="store_true", help="no GPU: the reference decoder, K=3, greedy")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: does it run, not how well")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    make_prompts(bench)
    extract(bench)
    if arguments.store_only:
        return
    chosen = list(trials(arguments.seeds))
    if arguments.only is not None:
        chosen = [t for variant in arguments.only for t in chosen if t.variant == variant]
    print(f"{len(chosen)} trials: {', '.join(t.name for t in chosen)}", flush=True)
    with ThreadPoolExecutor(arguments.parallel * arguments.devices) as pool:
        list(pool.map(lambda trial: run_trial(bench, trial), chosen))
    write_results(arguments.out, bench.rows, notes=bench.notes)


if __name__ == "__main__":
    main()
