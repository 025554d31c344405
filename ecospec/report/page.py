"""Reports as one self-contained HTML page: the page itself, sections, figures, tables, definitions, provenance.

Every function gives HTML that is already escaped, and takes text that is not, unless it says otherwise. Knows nothing
of what the numbers mean.
"""

import html
import shlex
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

DASH = "–"


@dataclass(frozen=True)
class Column:
    """`write` turns a value that is not null into text; a `timed` column rests on the clock."""

    key: str
    heading: str
    write: Callable[[object], str]
    timed: bool = False
    numeric: bool = True


def render_page(title: str, summary: str, parts: Sequence[str]) -> str:
    """The page, which refers to no other file or host; `parts` are HTML, empty ones are left out."""
    template = resources.files("ecospec.report").joinpath("page.html").read_text(encoding="utf-8")
    body = "\n".join(part for part in parts if part)
    return string.Template(template).substitute(title=html.escape(title), summary=html.escape(summary), body=body)


def section(heading: str, content: str) -> str:
    """`content` is HTML."""
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n{content}\n</section>"


def figure(heading: str, caption: str, entries: str, panels: Sequence[tuple[str, str]]) -> str:
    """Drawings side by side, each with its title; `caption`, `entries` (a legend or nothing) and drawings are HTML."""
    boxes = "\n".join(
        f'<div class="panel">{f"<h3>{html.escape(title)}</h3>" if title else ""}{drawing}</div>'
        for title, drawing in panels
    )
    return (
        f"<figure>\n<h2>{html.escape(heading)}</h2>\n<figcaption>{caption}</figcaption>\n{entries}\n"
        f'<div class="panels">\n{boxes}\n</div>\n</figure>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(sample as SVG, name) pairs in a row."""
    items = "".join(f"<li>{sample}{html.escape(name)}</li>" for sample, name in entries)
    return f'<ul class="legend">{items}</ul>'


def definitions(terms: Mapping[str, str]) -> str:
    entries = "\n".join(f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in terms.items())
    return f"<dl>\n{entries}\n</dl>"


def decimals(places: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:,.{places}f}{unit}"


def cell(row: Mapping, column: Column) -> str:
    """The text of one cell, a dash for null."""
    value = row.get(column.key)
    return DASH if value is None else column.write(value)


def html_table(caption: str, first: str, columns: Sequence[Column], bodies: Sequence[str], marked: bool = False) -> str:
    """A table in a scrolling container, `first` heading its row titles, `bodies` HTML.

    `marked` puts a dagger on the columns that rest on the clock.
    """
    headings = [f'<th scope="col">{html.escape(first)}</th>']
    for column in columns:
        dagger = "<sup>†</sup>" if marked and column.timed else ""
        headings.append(f'<th{_align(column)} scope="col">{html.escape(column.heading)}{dagger}</th>')
    return "\n".join(
        [
            f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>',
            f"<caption>{html.escape(caption)}</caption>",
            f"<thead><tr>{''.join(headings)}</tr></thead>",
            *bodies,
            "</table></div>",
        ]
    )


def html_row(row: Mapping, title: str, columns: Sequence[Column], highlight: bool = False) -> str:
    cells = "".join(f"<td{_align(column)}>{html.escape(cell(row, column))}</td>" for column in columns)
    marked = ' class="ours"' if highlight else ""
    return f'<tr{marked}><th scope="row">{html.escape(title)}</th>{cells}</tr>'


def provenance_of(name: str, provenance: Mapping) -> str:
    """The command, then every other entry of a `provenance.json` as a term and its value."""
    entries = {
        key.replace("_", " "): _plain(value) for key, value in provenance.items() if key not in ("command", "config")
    }
    command = html.escape(command_line(provenance))
    return f"<h3>{html.escape(name)}</h3>\n<pre><code>{command}</code></pre>\n{definitions(entries)}"


def command_line(provenance: Mapping) -> str:
    """The command of a `provenance.json` as one would type it."""
    command = provenance.get("command")
    return shlex.join(command) if isinstance(command, list) else str(command)


def _align(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _plain(value: object) -> str:
    """A value of `provenance.json` as one line of text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return DASH if value is None else str(value)
