"""`python -m eagle3lab store inspect|verify|merge|import`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3lab.config.errors import IntegrityError, Problem

if TYPE_CHECKING:
    from eagle3lab.config.schema import ModelConfig
    from eagle3lab.store.manifest import Manifest
    from eagle3lab.store.reader import StoreReader

DESCRIPTION = (
    "Look into a hidden-state store, check it, join the parts of several machines, import older files."
)


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns 0. Raises UserError and IntegrityError, which end with exit code 2."""
    arguments = _parser().parse_args(list(argv))
    arguments.run(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m eagle3lab store", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="inspect|verify|merge|import")

    inspect = commands.add_parser("inspect", help="what is inside: rows, tokens, lengths, size, identity")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("store", type=Path)
    inspect.add_argument("--json", action="store_true", help="one JSON object instead of text")
    inspect.add_argument("--rows", type=int, default=1, help="rows to decode where a tokenizer is given")
    _verifier_options(inspect, required=False)

    verify = commands.add_parser("verify", help="checksums, index and every row; with a verifier, alignment")
    verify.set_defaults(run=_verify)
    verify.add_argument("store", type=Path)
    verify.add_argument("--rows", type=_positive, default=4, help="rows of the alignment self-test")
    verify.add_argument("--device", type=_device, default="cpu", help="cpu or cuda: where the verifier runs")
    _verifier_options(verify, required=False)

    merge = commands.add_parser("merge", help="join the parts written with extract.num_parts")
    merge.set_defaults(run=_merge)
    merge.add_argument("whole", type=Path, help="the store to make")
    merge.add_argument("parts", type=Path, nargs="*", help="default: WHOLE.part*of* beside it")

    importing = commands.add_parser("import", help="sample files of speculators 0.3 to 0.9 -> a store")
    importing.set_defaults(run=_import)
    importing.add_argument("source", type=Path, help="directory with data_<n>.pt or hs_<n>.safetensors")
    importing.add_argument("store", type=Path)
    _verifier_options(importing, required=True)
    importing.add_argument("--layer-ids", type=int, nargs="+", help="aux layers in the files' order")
    importing.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float8_e4m3"), help="default: lossless"
    )
    importing.add_argument("--validation-share", type=_share, default=0.05)
    importing.add_argument("--shard-tokens", type=_positive, default=16384)
    importing.add_argument("--rows", type=_positive, default=4, help="rows of the alignment self-test")
    importing.add_argument(
        "--device", type=_device, default="cpu", help="cpu or cuda: where the verifier runs"
    )
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return share


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text} is not cpu or cuda")
    if text == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError("cuda is not visible here")
    return text


def _verifier_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--model-path", required=required, help="directory of the verifier's checkpoint")
    parser.add_argument("--tokenizer", help="directory of the tokenizer (default: --model-path)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the checkpoint"
    )


def _model(arguments: argparse.Namespace, name: str) -> ModelConfig:
    from eagle3lab.config.schema import ModelConfig

    return ModelConfig(
        name=name,
        path=arguments.model_path,
        tokenizer=arguments.tokenizer,
        trust_remote_code=arguments.trust_remote_code,
    )


def _inspect(arguments: argparse.Namespace) -> None:
    from eagle3lab.store.inventory import take_inventory

    inventory = take_inventory(arguments.store)
    if arguments.json:
        print(json.dumps(inventory.to_json(), indent=2))
        return
    print("\n".join(inventory.lines()))
    if not (arguments.model_path or arguments.tokenizer):
        print("decoded sample: give --model-path DIRECTORY of the verifier")
    elif inventory.manifest.complete and inventory.manifest.num_parts == 1:
        _print_sample(arguments, inventory.manifest)
    else:
        print("decoded sample: only of a finished store")


def _print_sample(arguments: argparse.Namespace, manifest: Manifest) -> None:
    from eagle3lab.rows.rows import Row
    from eagle3lab.rows.sample import describe_row
    from eagle3lab.rows.tokenizer import load_tokenizer, tokenizer_hash
    from eagle3lab.store.reader import StoreReader

    model = _model(arguments, manifest.verifier.name)
    directory = Path(arguments.model_path or arguments.tokenizer)
    if manifest.tokenizer_hash != tokenizer_hash(model, directory):
        print("WARNING: this tokenizer is not the one that the store names; the text may be wrong")
    tokenizer = load_tokenizer(model, directory)
    reader = StoreReader(arguments.store)
    step = max(1, len(reader) // max(1, arguments.rows))
    for i in range(0, len(reader), step)[: arguments.rows]:
        record = reader.rows[i]
        ids, mask = (tuple(part.tolist()) for part in reader.read_tokens(i))
        row = Row(record.row_id, record.conversation_id, record.source, record.split, ids, mask)
        print(describe_row(row, tokenizer))


def _verify(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import track

    from eagle3lab.store.answers import answers_files
    from eagle3lab.store.answers_check import check_answers
    from eagle3lab.store.reader import StoreReader

    reader = StoreReader(arguments.store, verify="full")
    manifest = reader.manifest
    shards = len({row.shard for row in reader.rows})
    small = "manifest, index, token counts and " if manifest.checksums else ""
    print(f"{small}{shards} shards have the bytes that were written")
    if not manifest.checksums:
        print("format 1: manifest, index and token counts have no checksums; index and manifest agree")
    console = Console(stderr=True)
    for i in track(range(len(reader)), "rows", console=console, disable=not console.is_terminal):
        reader.read(i)
    print(f"{len(reader):,} rows: ids and masks are those of their row ids, states finite and nowhere zero")
    if not manifest.all_last_states:
        count = sum(row.num_last_states for row in reader.rows)
        print(
            f"last states: {count:,} of {manifest.num_tokens:,} tokens, all that training can use by the masks"
        )
    _check_counts(reader)
    if answers_files(manifest.row_settings):
        print(f"answers: {check_answers(reader)}")
    if arguments.model_path is None:
        print("alignment: not tested; give --model-path DIRECTORY of the verifier")
        return

    from eagle3lab.extract.pipeline import verifier_identity
    from eagle3lab.extract.self_test import self_test_store
    from eagle3lab.store.manifest import check_identity
    from eagle3lab.verifier.facts import read_facts
    from eagle3lab.verifier.locate import locate_verifier

    path = locate_verifier(_model(arguments, manifest.verifier.name))
    facts = read_facts(path)
    check_identity(manifest, verifier_identity(facts, manifest.verifier.name))
    report = self_test_store(
        reader,
        path,
        facts,
        num_rows=arguments.rows,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(f"alignment self-test passed: {report}")


def _check_counts(reader: StoreReader) -> None:
    """The stored token counts against the rows themselves."""
    import torch

    counts = torch.zeros(reader.manifest.verifier.vocab_size, dtype=torch.int64)
    for i in reader.indices("train"):
        ids, mask = reader.read_tokens(i)
        counts += torch.bincount(ids[mask != 0], minlength=len(counts))
    different = int((counts != reader.token_counts()).sum())
    if different:
        raise IntegrityError(
            Problem(f"{reader.path}: token counts that are not those of the rows", different, "0")
        )
    print(f"token counts: {int(counts.sum()):,} supervised training tokens, as in the rows")


def _merge(arguments: argparse.Namespace) -> None:
    from eagle3lab.store.merge import merge_parts, parts_beside

    whole = arguments.whole.absolute()
    parts = arguments.parts or parts_beside(whole)
    manifest = merge_parts(parts, whole)
    print(
        f"joined {len(parts)} parts into {arguments.whole}: {manifest.num_rows:,} rows, "
        f"{manifest.num_tokens:,} tokens; checksums agree. The parts can be deleted"
    )


def _import(arguments: argparse.Namespace) -> None:
    from eagle3lab.extract.import_samples import import_samples
    from eagle3lab.verifier.locate import locate_verifier

    model = _model(arguments, Path(arguments.model_path).name)
    manifest = import_samples(
        arguments.source,
        arguments.store,
        model,
        locate_verifier(model),
        layer_ids=arguments.layer_ids,
        dtype=arguments.dtype,
        validation_share=arguments.validation_share,
        shard_tokens=arguments.shard_tokens,
        self_test_rows=arguments.rows,
        device=arguments.device,
    )
    print(
        f"imported {manifest.num_rows:,} rows, {manifest.num_tokens:,} tokens into {arguments.store}; "
        f"tokenizer and template are unknown to the files and so to the store"
    )
