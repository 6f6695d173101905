"""The files of a comparison, of runs or of evaluations: CSV, PNG, and a page that holds both."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.store.files import write_text

from .html_page import Block, write_page

CSV, PLOT = "comparison.csv", "comparison.png"


def write_comparison(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    plot: Callable[[Path], None],
    blocks: Callable[[Path], Sequence[Block]],
    *,
    out: Path | None,
    html: Path | None,
) -> list[Path]:
    """CSV and plot into `out`, the page where `html` says; what is None is not written. Returns what was.

    Args:
        rows: of the CSV, with the same keys; an empty cell where a value is None.
        plot: draws to the path it is given.
        blocks: of the page, from the drawn plot.
    """
    written = []
    if out:
        out.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(out / CSV, text.getvalue())
        plot(out / PLOT)
        written += [out / CSV, out / PLOT]
    if html:
        with tempfile.TemporaryDirectory() as scratch:
            drawn = Path(scratch) / PLOT
            plot(drawn)
            write_page(html, title, blocks(drawn))
        written.append(html)
    return written
