"""Tables of all reports: how values are written, and rows of them as HTML, Markdown or aligned text.

HTML that a function gives is already escaped, and the text that it takes is not, unless it says otherwise. Knows
nothing of what the numbers mean.
"""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

DASH = "–"


@dataclass(frozen=True)
class Column:
    """`write` turns a value that is not null into text; a `timed` column rests on the clock."""

    key: str
    heading: str
    write: Callable[[object], str]
    timed: bool = False
    numeric: bool = True


def decimals(places: int, unit: str = "") -> Callable[[float], str]:
    """Writes a number with as many decimal places, and commas between thousands."""
    return lambda value: f"{value:,.{places}f}{unit}"


def signed(places: int) -> Callable[[float], str]:
    """Writes a number with its sign, plus included."""
    return lambda value: f"{value:+.{places}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def cell(row: Mapping, column: Column) -> str:
    """The text of one cell, a dash for null."""
    value = row.get(column.key)
    return DASH if value is None else column.write(value)


@dataclass(frozen=True)
class Table:
    """Rows of cells as text; cells of `numeric` columns stand to the right."""

    headings: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls, titles: Sequence[str], columns: Sequence[Column], rows: Iterable[tuple[Sequence[str], Mapping]]
    ) -> "Table":
        """A row for each pair of title cells, which `titles` head, and values by the columns' keys."""
        return cls(
            [*titles, *(column.heading for column in columns)],
            [*[False] * len(titles), *(column.numeric for column in columns)],
            [[*names, *(cell(row, column) for column in columns)] for names, row in rows],
        )

    def markdown(self) -> str:
        """As Markdown, without a line break at the end."""
        rules = ["---:" if numeric else "---" for numeric in self.numeric]
        return "\n".join(f"| {' | '.join(map(markdown_text, row))} |" for row in (self.headings, rules, *self.rows))

    def text(self) -> str:
        """As lines for a terminal, two blanks between columns."""
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        placed = [str.rjust if numeric else str.ljust for numeric in self.numeric]
        return "\n".join("  ".join(map(_place, placed, line, widths)) for line in lines)


def markdown_text(text: str) -> str:
    """`text` as it is shown: no tags, no column breaks, one line."""
    return " ".join(html.escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|").split())


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


def _place(place: Callable[[str, int], str], text: str, width: int) -> str:
    return place(text, width)


def _align(column: Column) -> str:
    return ' class="number"' if column.numeric else ""
