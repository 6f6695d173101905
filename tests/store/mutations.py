"""Ways in which a store can be wrong. Every one changes the directory; none may be accepted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.store.files import sha256_of

Mutation = Callable[[Path, random.Random], None]
MUTATIONS: dict[str, Mutation] = {}
STATES = ("aux_hidden_states", "verifier_last_hidden_states")


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def shard(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted((path / "shards").iterdir()))


def edit_tensors(path: Path, rng: random.Random, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite one shard with changed tensors, its own metadata and, in the index, its new checksum."""
    file = shard(path, rng)
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata=metadata)
    if rng.random() < 0.5:  # as a tool that keeps the checksums of shards right would leave it
        entries = [json.loads(line) for line in (path / "index.jsonl").read_text().splitlines()]
        for entry in entries:
            if entry["file"].endswith(file.name):
                entry["sha256"] = sha256_of(file)
        write_lines(path, entries)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "index.jsonl").read_text().splitlines()]


def write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(e, ensure_ascii=False, separators=(",", ":")) + "\n" for e in entries)
    (path / "index.jsonl").write_text(text)


def edit_manifest(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2, sort_keys=True) + "\n")


@mutation
def shard_cut(path: Path, rng: random.Random) -> None:
    file = shard(path, rng)
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


@mutation
def shard_longer(path: Path, rng: random.Random) -> None:
    file = shard(path, rng)
    file.write_bytes(file.read_bytes() + bytes(rng.randrange(1, 50)))


@mutation
def shard_bit_flipped(path: Path, rng: random.Random) -> None:
    file = shard(path, rng)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@mutation
def shard_block_zeroed(path: Path, rng: random.Random) -> None:
    file = shard(path, rng)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) // 2, len(data) - 64)
    data[at : at + 64] = bytes(64)
    file.write_bytes(data)


@mutation
def shard_missing(path: Path, rng: random.Random) -> None:
    shard(path, rng).unlink()


@mutation
def shards_exchanged(path: Path, rng: random.Random) -> None:
    one, two = rng.sample(sorted((path / "shards").iterdir()), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


@mutation
def shard_of_another_number(path: Path, rng: random.Random) -> None:
    one, two = rng.sample(sorted((path / "shards").iterdir()), 2)
    one.write_bytes(two.read_bytes())


@mutation
def nan(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: _fill(t, rng, float("nan")))


@mutation
def inf(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:  # e4m3 has no infinity; its scales do
        name = "aux_scales" if "aux_scales" in tensors else rng.choice(STATES)
        tensors[name][rng.randrange(len(tensors[name])), 0] = float("inf")

    edit_tensors(path, rng, edit)


@mutation
def zeros(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: _fill(t, rng, 0.0))


def _fill(tensors: dict[str, Any], rng: random.Random, value: float) -> None:
    states = tensors[rng.choice(STATES)]
    states[rng.randrange(len(states))] = value


@mutation
def states_one_token_late(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        name = rng.choice(STATES)
        tensors[name] = torch.cat([tensors[name][-1:], tensors[name][:-1]])

    edit_tensors(path, rng, edit)


@mutation
def layers_exchanged(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        first, second, third = tensors["aux_hidden_states"].chunk(3, dim=1)
        tensors["aux_hidden_states"] = torch.cat([second, first, third], dim=1)

    edit_tensors(path, rng, edit)


@mutation
def wrong_dtype(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        name = rng.choice((*STATES, "input_ids", "loss_mask"))
        tensors[name] = tensors[name].float()

    edit_tensors(path, rng, edit)


@mutation
def tensor_missing(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: t.pop(rng.choice(sorted(t))))


@mutation
def tensor_too_many(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: t.update(extra=torch.zeros(rng.randrange(1, 9))))


@mutation
def one_token_short(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        name = rng.choice(sorted(tensors))
        tensors[name] = tensors[name][:-1].clone()

    edit_tensors(path, rng, edit)


@mutation
def other_token(path: Path, rng: random.Random) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        at = rng.randrange(len(tensors["input_ids"]))
        tensors["input_ids"][at] = (tensors["input_ids"][at] + rng.randrange(1, 90)) % 97

    edit_tensors(path, rng, edit)


@mutation
def other_mask(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: t["loss_mask"][rng.randrange(len(t["loss_mask"]))].bitwise_xor_(1))


@mutation
def rows_of_a_shard_reordered_in_its_tensors(path: Path, rng: random.Random) -> None:
    edit_tensors(path, rng, lambda t: t.update({name: tensor.flip(0) for name, tensor in t.items()}))


@mutation
def metadata_of_other_layers(path: Path, rng: random.Random) -> None:
    file = shard(path, rng)
    with safe_open(file, "pt") as handle:
        origin = json.loads(handle.metadata()["eagle3lab-store"])
    origin["layer_ids"] = [1, 4, 5]
    save_file(load_file(file), file, metadata={"eagle3lab-store": json.dumps(origin, sort_keys=True)})


@mutation
def index_line_twice(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    write_lines(path, [*entries, rng.choice(entries)])


@mutation
def index_lines_reordered(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    i, j = rng.sample(range(len(entries)), 2)
    entries[i], entries[j] = entries[j], entries[i]
    write_lines(path, entries)


@mutation
def index_line_missing(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    entries.pop(rng.randrange(len(entries)))
    write_lines(path, entries)


@mutation
def index_rows_reordered(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    entry = rng.choice([e for e in entries if len(e["rows"]) > 1])
    entry["rows"].reverse()
    offset = 0
    for row in entry["rows"]:  # contiguous again
        row["offset"], offset = offset, offset + row["length"]
    write_lines(path, entries)


@mutation
def index_row_field(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    row = rng.choice(rng.choice(entries)["rows"])
    name = rng.choice(sorted(row))
    row[name] = row[name] + (1 if isinstance(row[name], int) else "x")
    write_lines(path, entries)


@mutation
def index_entry_field(path: Path, rng: random.Random) -> None:
    entries = lines(path)
    entry = rng.choice(entries)
    name = rng.choice(["file", "sha256", "num_tokens"])
    entry[name] = {"file": "../" + entry["file"], "sha256": "0" * 64, "num_tokens": 1}[name]
    write_lines(path, entries)


@mutation
def index_cut(path: Path, rng: random.Random) -> None:
    data = (path / "index.jsonl").read_bytes()
    (path / "index.jsonl").write_bytes(data[: rng.randrange(len(data))])


@mutation
def index_garbage(path: Path, rng: random.Random) -> None:
    with open(path / "index.jsonl", "ab") as file:
        file.write(rng.choice([b"\n", b"{}\n", b"\xff\xfe\n", b"null\n", b"[1]\n", b'{"rows": 3}\n']))


@mutation
def index_missing(path: Path, rng: random.Random) -> None:
    (path / "index.jsonl").unlink()


@mutation
def manifest_field(path: Path, rng: random.Random) -> None:
    changes: dict[str, Any] = {
        "tokenizer_hash": "o" * 8, "template_hash": "o" * 8, "template_args_hash": "o" * 8,
        "layer_ids": [4, 2, 5], "dtype": "float32", "last_state": "post_norm", "num_rows": 11,
        "engine": {"name": "vllm"}, "planned_rows_hash": "0" * 64, "complete": False,
        "accounting": {"read": 12, "kept": 12, "dropped": {"too_long": 3}}, "format_version": 99,
        "layer_convention": "inputs", "checksums": {}, "num_supervised": 0, "shard_tokens": 41,
        "last_state_rows": "all",
    }  # fmt: skip
    name = rng.choice(sorted(changes))
    edit_manifest(path, **{name: changes[name]})


@mutation
def manifest_cut(path: Path, rng: random.Random) -> None:
    data = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(data[: rng.randrange(len(data) - 2)])


@mutation
def manifest_missing(path: Path, rng: random.Random) -> None:
    (path / "manifest.json").unlink()


@mutation
def token_counts_exchanged(path: Path, rng: random.Random) -> None:
    file = path / "token_counts.safetensors"
    counts = load_file(file)["token_counts"].clone()
    low, high = int(counts.argmin()), int(counts.argmax())
    counts[low], counts[high] = counts[high].clone(), counts[low].clone()
    save_file({"token_counts": counts}, file)


@mutation
def token_counts_missing(path: Path, rng: random.Random) -> None:
    (path / "token_counts.safetensors").unlink()
