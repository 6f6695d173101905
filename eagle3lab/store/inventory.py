"""What a store holds, from its manifest and index alone. No torch; unfinished stores and parts as well."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.store.index import read_index
from eagle3lab.store.manifest import Manifest, is_store, read_manifest

_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Inventory:
    """Counts of what is indexed; `manifest` has those of the whole plan."""

    path: Path
    manifest: Manifest
    num_rows: dict[str, int]  # by split
    num_tokens: int
    num_supervised: int
    num_shards: int
    num_bytes: int  # of all files
    lengths: dict[int, int]  # smallest power of two that holds the row -> rows
    longest: int

    @property
    def supervised_share(self) -> float:
        return self.num_supervised / max(1, self.num_tokens)

    def to_json(self) -> dict[str, Any]:
        manifest = asdict(self.manifest)
        return {
            "path": str(self.path),
            "manifest": manifest,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_supervised": self.num_supervised,
            "supervised_share": self.supervised_share,
            "num_shards": self.num_shards,
            "num_bytes": self.num_bytes,
            "lengths": self.lengths,
            "longest": self.longest,
        }

    def lines(self) -> list[str]:
        """For people."""
        m = self.manifest
        if m.num_parts > 1:
            state = f"part {m.part} of {m.num_parts}, {'complete' if m.complete else 'NOT FINISHED'}"
        else:
            state = "complete" if m.complete else "NOT FINISHED"
        rows = ", ".join(f"{count:,} {split}" for split, count in sorted(self.num_rows.items()))
        v = m.verifier
        lines = [
            f"store        {self.path} ({state}, format {m.format_version})",
            f"verifier     {v.name or '?'}: {v.architecture}, {v.num_layers} layers, hidden {v.hidden_size}, "
            f"vocabulary {v.vocab_size}",
            f"             weights {v.weight_fingerprint[:16]}, config {v.config_hash[:16]}",
            f"rows from    tokenizer {m.tokenizer_hash[:16]}, template {m.template_hash[:16]}, "
            f"its arguments {m.template_args_hash[:16]}",
            f"states       layers {list(m.layer_ids)} ({m.layer_convention}) and the last one ({m.last_state}), "
            f"{m.dtype}",
            f"engine       {', '.join(f'{key} {value}' for key, value in m.engine.items())}",
            f"rows         {sum(self.num_rows.values()):,} ({rows})",
            f"tokens       {self.num_tokens:,}, {self.num_supervised:,} supervised ({self.supervised_share:.1%})",
            f"on disk      {self.num_bytes / 1e9:.3f} GB in {self.num_shards} shards, "
            f"{self.num_bytes / max(1, self.num_tokens):,.0f} bytes per token",
        ]
        if not m.complete or m.num_parts > 1:
            lines.append(f"whole plan   {m.num_rows:,} rows, {m.num_tokens:,} tokens")
        account = {key: value for key, value in m.accounting.items() if value and key != "examples"}
        lines.append(f"accounting   {', '.join(f'{key} {value}' for key, value in account.items())}")
        most = max(self.lengths.values(), default=1)
        lines.append(f"row lengths, the longest {self.longest} tokens")
        lines += [
            f"  <= {bound:>6} {count:>9,} {'#' * max(1, round(_BAR * count / most))}"
            for bound, count in self.lengths.items()
        ]
        return lines


def take_inventory(path: Path) -> Inventory:
    """Read manifest and index of the store, or part of one, at `path`; states are not looked at."""
    if not is_store(path):
        raise UserError(
            Problem("there is no hidden-state store", str(path), "a directory written by extract.py")
        )
    manifest = read_manifest(path)
    entries, _ = read_index(path)
    rows = [row for entry in entries for row in entry.rows]
    bounds = Counter(1 << max(0, row.length - 1).bit_length() for row in rows)
    return Inventory(
        path=path,
        manifest=manifest,
        num_rows=dict(Counter(row.split for row in rows)),
        num_tokens=sum(row.length for row in rows),
        num_supervised=sum(row.supervised for row in rows),
        num_shards=len(entries),
        num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        lengths=dict(sorted(bounds.items())),
        longest=max((row.length for row in rows), default=0),
    )
