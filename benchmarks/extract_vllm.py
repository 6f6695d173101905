"""`extract.py` into a finished store beside the same engine's plain prefill of the same tokens, in turns.

python benchmarks/extract_vllm.py --out benchmarks/results/extract_h200.json

The verifier has the shapes of Qwen3-8B and random weights in real files: extract.py runs as a user types it,
self-test included. Its clock runs from the first request after the self-test to the finished store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import ROOT, write_results
from synthetic_checkpoint import END_TOKEN, TEMPLATE, make_conversations, make_verifier, rows_of

from eagle3lab.config.schema import Shapes
from eagle3lab.engines.vllm_settings import VllmSettings

QWEN3_8B = Shapes(4096, 12288, 36, 32, 8, 128, 151936, 8_190_735_360)
SMALL = Shapes(256, 768, 4, 4, 2, 64, 2048, 5_000_000)  # to try the script on a CPU
ROUNDS = {  # name -> store.dtype, whether in memory
    "disk": ("bfloat16", False),
    "memory": ("bfloat16", True),
    "fp8": ("float8_e4m3", False),
    "fp8_memory": ("float8_e4m3", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/extract_h200.json")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/eagle3lab-bench"), help="where disk stores lie"
    )
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm/eagle3lab-bench"))
    parser.add_argument("--prompts", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--rounds", nargs="+", choices=sorted(ROUNDS), default=["disk", "memory", "fp8"])
    parser.add_argument(
        "--verify", type=int, default=1, help="rounds whose store is read back whole, unclocked"
    )
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the GPU, for each of two engines")
    parser.add_argument(
        "--touch-gib", type=int, default=0, help="memory to use and free before anything is clocked"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a small verifier, to try this script")
    parser.add_argument("--clocked", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clocked:
        clocked_extract(Path(arguments.clocked[0]), arguments.clocked[1:])
        return
    try:
        measure(arguments)
    finally:
        shutil.rmtree(arguments.memory, ignore_errors=True)


def measure(arguments: argparse.Namespace) -> None:
    """All rounds; the results are written after every one."""
    verifier, conversations = arguments.memory / "verifier", arguments.memory / "conversations.jsonl"
    shapes = SMALL if arguments.small else QWEN3_8B
    start = time.perf_counter()
    make_verifier(verifier, shapes, arguments.device)
    make_conversations(conversations, arguments.prompts, arguments.length)
    rows = rows_of(verifier, conversations, arguments.length)
    disk = disk_speed(arguments.work, 2**28 if arguments.small else 2**32)
    seconds = time.perf_counter() - start
    print(f"verifier, {len(rows)} prompts: {seconds:.1f} s; disk: {disk} GB/s", flush=True)

    results: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    starting = PlainEngine(verifier, rows, arguments)
    touch_memory(arguments.memory, arguments.touch_gib)
    with starting as plain:
        before = plain.tokens_per_second()
        for number, name in enumerate(arguments.rounds):
            dtype, in_memory = ROUNDS[name]
            store = (arguments.memory if in_memory else arguments.work) / "store"
            run = extract(verifier, conversations, store, dtype, arguments)
            after = plain.tokens_per_second()
            beside = (before + after) / 2  # of the two plain rounds around it
            results.append(
                {
                    "backend": "vllm",
                    "plain_tok_s": round(beside),
                    "extract_tok_s": round(run["tokens"] / run["seconds"]),
                    "ratio": round(run["tokens"] / run["seconds"] / beside, 4),
                    "gb_s": round(run["bytes"] / run["seconds"] / 1e9, 3),
                    "storage": dtype,
                    "where": "memory" if in_memory else "disk",
                    "seconds": run["stages"],
                }
            )
            rounds.append({"round": name, "plain_before": before, "plain_after": after, **run})
            before = after
            print(results[-1], flush=True)
            write_results(  # after every round: what was measured stays when a later one fails
                arguments.out,
                results,
                notes={
                    "shapes": vars(shapes),
                    "prompts": arguments.prompts,
                    "length": arguments.length,
                    "batch_tokens": arguments.batch_tokens,
                    "engine": run["engine"],
                    "rounds": [{**r, "engine": None} for r in rounds],
                    "disk_write_gb_s": disk,
                    "touched_gib": arguments.touch_gib,
                },
            )
            if number < arguments.verify:
                verify = [sys.executable, "-m", "eagle3lab", "store", "verify", str(store)]
                subprocess.run(verify, cwd=ROOT, check=True)
            shutil.rmtree(store)


class PlainEngine:
    """vLLM without extraction and otherwise as `extract.py` starts it, in a process of its own."""

    def __init__(
        self, verifier: Path, rows: Sequence[tuple[int, ...]], arguments: argparse.Namespace
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        settings = plain_settings(verifier, arguments)
        self._process = context.Process(target=serve_plain, args=(theirs, settings, list(rows)))
        self._process.start()
        theirs.close()

    def __enter__(self) -> PlainEngine:
        print(f"plain engine ready after {self._connection.recv():.1f} s", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(60)
        self._process.kill()

    def tokens_per_second(self) -> float:
        """Of one pass over all prompts."""
        self._connection.send("again")
        speed: float = self._connection.recv()
        print(f"plain prefill: {speed:,.0f} tok/s", flush=True)
        return speed


def plain_settings(verifier: Path, arguments: argparse.Namespace) -> VllmSettings:
    """The settings that `extract.py` arrives at for this verifier and hardware."""
    return VllmSettings(
        path=verifier,
        model_type="qwen3",
        layer_ids=(1,),  # set up for states; what captures them is left out below
        dtype="bfloat16" if arguments.device == "cuda" else "float32",
        device=arguments.device,
        max_len=arguments.length,
        batch_tokens=arguments.batch_tokens,
        scratch=arguments.memory,
        eos_token_ids=(END_TOKEN,),
        max_positions=40960,
        memory_share=arguments.memory_share,
    )


def serve_plain(connection: Connection, settings: VllmSettings, rows: list[tuple[int, ...]]) -> None:
    """Load, warm up, then prefill everything once for every message."""
    start = time.perf_counter()
    settings.prepare_environment()
    from vllm import LLM, SamplingParams

    left_out = ("speculative_config", "kv_transfer_config", "worker_extension_cls")
    llm = LLM(**{name: value for name, value in settings.arguments().items() if name not in left_out})
    sampling = SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=[END_TOKEN], detokenize=False)
    prompts = [{"prompt_token_ids": list(row)} for row in rows]
    llm.generate(prompts[:32], sampling, use_tqdm=False)
    connection.send(time.perf_counter() - start)
    with contextlib.suppress(EOFError):
        while connection.recv():
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            connection.send(sum(map(len, rows)) / (time.perf_counter() - start))


def extract(
    verifier: Path, conversations: Path, store: Path, dtype: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One run of `extract.py` in a process of its own, the plain engine idle meanwhile."""
    shutil.rmtree(store, ignore_errors=True)
    store.parent.mkdir(parents=True, exist_ok=True)
    clock = arguments.memory / "clock.json"
    command = [
        "model=local", "model.name=synthetic", f"model.path={verifier}", f"model.template={TEMPLATE}",
        "data=jsonl", "data.name=synthetic", f"data.paths=[{conversations}]", f"data.max_len={arguments.length}",
        f"hardware={'h200' if arguments.device == 'cuda' else 'cpu'}",
        f"hardware.engine.memory_share={arguments.memory_share}", "extract.backend=vllm",
        f"extract.batch_tokens={arguments.batch_tokens}", f"extract.dtype={dtype}", f"store={store}",
    ]  # fmt: skip
    if arguments.small:
        command.append("extract.layer_ids=[1,2,3]")
    print("$ extract.py", " ".join(command), flush=True)
    start = time.perf_counter()
    script = str(Path(__file__).resolve())
    subprocess.run([sys.executable, script, "--clocked", str(clock), *command], cwd=ROOT, check=True)
    whole = time.perf_counter() - start
    manifest = json.loads((store / "manifest.json").read_text())
    log = json.loads((store / "logs/extract.json").read_text())["runs"][-1]
    assert manifest["complete"]
    assert manifest["num_tokens"] == arguments.prompts * arguments.length
    return {
        "seconds": json.loads(clock.read_text())["seconds"],
        "tokens": manifest["num_tokens"],
        "bytes": sum(file.stat().st_size for file in store.rglob("*") if file.is_file()),
        "stages": {**log["seconds"], "whole_command": round(whole, 3)},
        "engine": manifest["engine"],
    }


def clocked_extract(clock: Path, words: Sequence[str]) -> None:
    """`extract.py` with these words; the time from the opened to the finished store goes to `clock`."""
    from eagle3lab.cli import main as command
    from eagle3lab.store.writer import StoreWriter

    seconds: dict[str, float] = {}
    enter, finish = StoreWriter.__enter__, StoreWriter.finish

    def timed_enter(writer: Any) -> Any:
        entered = enter(writer)
        seconds["start"] = time.perf_counter()
        return entered

    def timed_finish(writer: Any) -> Any:
        manifest = finish(writer)
        seconds["seconds"] = time.perf_counter() - seconds["start"]
        return manifest

    StoreWriter.__enter__, StoreWriter.finish = timed_enter, timed_finish  # type: ignore[method-assign]
    sys.argv = ["extract.py", *words]
    command("extract")
    clock.write_text(json.dumps(seconds))


def touch_memory(directory: Path, gib: int) -> None:
    """Fill and free memory: a virtual machine may own little of it until it is used, and pay for that once."""
    file = directory / "touched"
    start = time.perf_counter()
    with file.open("wb") as stream, contextlib.suppress(OSError):
        os.posix_fallocate(stream.fileno(), 0, max(1, gib * 2**30))
    file.unlink()
    if gib:
        print(f"touched {gib} GiB of memory: {time.perf_counter() - start:.1f} s", flush=True)


def disk_speed(directory: Path, num_bytes: int) -> float:
    """GB/s of one thread that writes random bytes and waits for the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    file, block = directory / "speed", os.urandom(2**26)
    start = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for _ in range(num_bytes // len(block)):
            stream.write(block)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    file.unlink()
    return round(num_bytes / seconds / 1e9, 3)


if __name__ == "__main__":
    main()
