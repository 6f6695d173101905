"""Rows for people to look at: what is supervised stands in double brackets."""

from __future__ import annotations

from itertools import groupby

from eagle3lab.rows.render import decode
from eagle3lab.rows.rows import Row, RowSet
from eagle3lab.rows.tokenizer import Tokenizer

MAX_CONTEXT_CHARS = 160  # of one unsupervised stretch; its middle is left out


def describe_sample(rowset: RowSet, tokenizer: Tokenizer, num_rows: int = 3) -> str:
    """The account and some rows spread evenly over the set, as text.

    `[[...]]` marks the supervised stretches, which must read as the verifier's own answers with
    their end tokens; the rest is context, shortened in the middle.
    """
    rows = rowset.rows
    step = max(1, len(rows) // num_rows) if rows else 1
    share = rowset.num_supervised / max(1, rowset.num_tokens)
    head = [
        *rowset.accounting.lines(),
        f"{rowset.num_tokens} tokens, {rowset.num_supervised} supervised ({share:.0%}), "
        f"{rowset.num_rows('train')} train and {rowset.num_rows('validation')} validation rows, "
        f"at most {rowset.max_len} tokens each",
    ]
    return "\n".join(head + [describe_row(row, tokenizer) for row in rows[::step][:num_rows]])


def describe_row(row: Row, tokenizer: Tokenizer) -> str:
    """One row as text, its supervised stretches in double brackets."""
    pieces = []
    pairs = zip(row.input_ids, row.loss_mask, strict=True)
    for supervised, group in groupby(pairs, key=lambda pair: pair[1]):
        text = decode(tokenizer, [token for token, _ in group])
        pieces.append(f"[[{text}]]" if supervised else _shorten(text))
    title = f"--- {row.source}, {row.split}, {len(row.input_ids)} tokens, {sum(row.loss_mask)} supervised"
    return f"{title}\n{''.join(pieces)}"


def _shorten(text: str) -> str:
    if len(text) <= MAX_CONTEXT_CHARS:
        return text
    half = MAX_CONTEXT_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"
