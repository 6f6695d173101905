"""One HTML file that needs nothing beside it: texts, tables that sort on a click, pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from eagle3lab.store.files import write_text


@dataclass(frozen=True)
class HtmlTable:
    """Texts under columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | HtmlTable | Path  # a paragraph, a table, a PNG file

_STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { cursor: pointer; background: #f2f5f6; }
img { max-width: 100%; }
"""
# numbers by size, other texts by letters; a second click turns the order round
_SORT = """\
document.querySelectorAll("th").forEach(function (head) {
  head.addEventListener("click", function () {
    var body = head.closest("table").tBodies[0], i = head.cellIndex;
    var up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
    var key = function (row) { return row.cells[i].textContent.replace(/,/g, ""); };
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a), y = key(b), d = parseFloat(x) - parseFloat(y);
      return (isNaN(d) ? x.localeCompare(y) : d) * (up === "1" ? 1 : -1);
    }).forEach(function (row) { body.appendChild(row); });
  });
});
"""


def figure_cell(value: object) -> str:
    """A measured figure to six digits, `-` where it was not measured; what is no number stays as it is."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def write_page(path: Path, title: str, blocks: Sequence[Block]) -> None:
    """Write the page to `path`. Texts are escaped; pictures become data URIs."""
    body = "\n".join(_html(block) for block in blocks)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path,
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n"
        f"<script>\n{_SORT}</script>\n</body>\n</html>\n",
    )


def _html(block: Block) -> str:
    if isinstance(block, HtmlTable):
        head = "".join(f"<th>{escape(column)}</th>" for column in block.columns)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
        )
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    if isinstance(block, Path):
        data = base64.b64encode(block.read_bytes()).decode("ascii")
        return f'<img alt="{escape(block.stem)}" src="data:image/png;base64,{data}">'
    return f"<p>{escape(block)}</p>"
