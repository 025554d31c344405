"""Reports as one self-contained HTML page: the page itself, sections, figures, definitions, provenance.

Every function gives HTML that is already escaped, and takes text that is not, unless it says otherwise. Knows nothing
of what the numbers mean.
"""

import html
import shlex
import string
from collections.abc import Mapping, Sequence
from importlib import resources

from ecospec.report.table import DASH


def render_page(title: str, summary: str, parts: Sequence[str], style: str = "") -> str:
    """The page, which refers to no other file or host; `parts` are HTML, empty ones are left out, `style` is CSS."""
    template = resources.files("ecospec.report").joinpath("page.html").read_text(encoding="utf-8")
    body = "\n".join(part for part in parts if part)
    texts = {"title": html.escape(title), "summary": html.escape(summary), "body": body, "style": style}
    return string.Template(template).substitute(texts)


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


def _plain(value: object) -> str:
    """A value of `provenance.json` as one line of text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return DASH if value is None else str(value)
