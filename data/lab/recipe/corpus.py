"""Training text of the lab target: JSON Lines files in, `Document`s in four domains out.

Knows nothing about tokens or models. A document is a prompt and its answer (the prompt may be empty), and
`format_prompt` is the one place that says how a question of each domain is put to the lab target.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOMAINS = ("maths", "code", "terms", "prose")
TEXT_FILES = (
    "gsm8k_train.jsonl",
    "train_synthetic_maths.jsonl",
    "train_mbpp.jsonl",
    "train_python_algorithms.jsonl",
    "train_python_stdlib.jsonl",
    "train_jargon.jsonl",
    "train_python_docs.jsonl",
)
HELD_OUT_PERCENT = 2
LONGEST_FUNCTION = 2500  # characters; longer functions appear only inside their file
LONGEST_DEFINITION = 1100  # characters, cut at a paragraph
LONGEST_SECTION = 1500  # characters, cut at a paragraph
LONGEST_FILE_PIECE = 6000  # characters, cut before a top-level statement

_Piece = tuple[str, str, str, int | str]  # domain, prompt, answer, row (or headword) it was cut from
_ROLE = re.compile(r":[a-z:]+:`(?:[^`<]*<)?[~!]?([^`>]+)>?`")
_HEADING = re.compile(r"^(\S[^\n]*)\n([=\-~*^#\"+])\2{2,}\s*$", re.MULTILINE)
_DIRECTIVE_ENTRY = re.compile(
    r"^\.\. (?:function|class|method|attribute|data|exception|opcode|option)::[ ]*([^\n]+)\n((?:[ ]{3,}[^\n]*\n|\n)+)",
    re.MULTILINE,
)
_JARGON_ENTRY = re.compile(r"^   :([^:\n]{1,50}):[^\n]*\n((?:(?!   :[^:\n]{1,50}:)[^\n]*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One training text: `prompt` as the target sees it (may be empty), then `answer`; `source` is its file and row."""

    domain: str
    prompt: str
    answer: str
    source: str = field(compare=False)

    @property
    def text(self) -> str:
        return self.prompt + self.answer

    @property
    def held_out(self) -> bool:
        """True for the 2 % of source rows that no training touches, with all the documents made of them."""
        return int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def format_prompt(domain: str, question: str) -> str:
    """The text that asks the lab target `question`. Raises KeyError for an unknown domain."""
    return {
        "maths": "Question: {}\nAnswer:",
        "code": "Task: {}\nCode:\n",
        "terms": "Term: {}\nDefinition:",
        "prose": "# {}",
    }[domain].format(question)


def read_rows(path: Path) -> Iterator[dict]:
    """Rows of a JSON Lines file; only the newline character separates them."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def read_documents(text_dir: str | Path) -> list[Document]:
    """All documents of the seven training files in `text_dir`, duplicates removed, in a fixed order.

    Raises FileNotFoundError naming the first file that is missing.
    """
    text_dir = Path(text_dir)
    documents = []
    for name in TEXT_FILES:
        for domain, prompt, answer, row in _READERS[name](list(read_rows(text_dir / name))):
            documents.append(Document(domain, prompt, answer, f"{name}/{row}"))
    return list(dict.fromkeys(documents))


def _maths(rows: list[dict]) -> Iterator[_Piece]:
    for number, row in enumerate(rows):
        answer = row.get("reference") or row["response"]
        answer = re.sub(r"<<[^>]*>>", "", answer).replace("\n#### ", "\nThe answer is ")
        yield "maths", format_prompt("maths", row["prompt"]), " " + answer, number


def _mbpp(rows: list[dict]) -> Iterator[_Piece]:
    for number, row in enumerate(rows):
        code = row["response"].replace("\r\n", "\n").replace("\t", "    ")
        yield "code", format_prompt("code", row["prompt"]), code.strip(), number


def _python_files(rows: list[dict]) -> Iterator[_Piece]:
    for number, row in enumerate(rows):
        source = row["text"].replace("\t", "    ")
        tree = ast.parse(source)
        yield from (("code", prompt, code, number) for prompt, code in _functions(tree, source))
        yield from (("code", "", piece, number) for piece in _file_pieces(tree, source))


def _functions(tree: ast.Module, source: str) -> Iterator[tuple[str, str]]:
    """Functions that say what they do, as (first paragraph of the docstring → code without it)."""
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or not ast.get_docstring(node):
            continue
        task = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
        kept = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
        code = "\n".join(line[node.col_offset :] for line in kept)
        if len(code) <= LONGEST_FUNCTION and len(task) >= 15:
            yield format_prompt("code", task), code.strip()


def _file_pieces(tree: ast.Module, source: str) -> Iterator[str]:
    lines, piece = source.split("\n"), ""
    starts = [node.lineno - 1 for node in tree.body[1:]] + [len(lines)]
    for start, end in zip([0, *starts[:-1]], starts, strict=True):
        block = "\n".join(lines[start:end]) + "\n"
        if piece and len(piece) + len(block) > LONGEST_FILE_PIECE:
            yield piece.strip("\n")
            piece = ""
        piece += block
    if piece.strip():
        yield piece.strip("\n")


def _jargon(rows: list[dict]) -> Iterator[_Piece]:
    text = "\n\n".join(row["text"] for row in rows) + "\n"
    for term, body in _JARGON_ENTRY.findall(text):
        definition = _leading_paragraphs(_paragraphs(body), LONGEST_DEFINITION)
        if len(definition) >= 40:
            yield "terms", format_prompt("terms", term), " " + definition, term


def _python_docs(rows: list[dict]) -> Iterator[_Piece]:
    for number, row in enumerate(rows):
        text = _ROLE.sub(r"`\1`", row["text"]).replace("``", "`")
        for term, body in _DIRECTIVE_ENTRY.findall(text):
            definition = _leading_paragraphs(_paragraphs(body), LONGEST_DEFINITION)
            if len(definition) >= 40:
                yield "terms", format_prompt("terms", term.strip()), " " + definition, number
        yield from (("prose", prompt, section, number) for prompt, section in _sections(text))


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Sections of a reStructuredText page as (`# heading` → text), long ones cut at paragraphs."""
    parts = _HEADING.split(text)
    for heading, body in zip(parts[1::3], parts[3::3], strict=True):
        paragraphs = [p for p in _paragraphs(body, reflow=False) if not p.startswith((".. index", ".. _", "..\n"))]
        while paragraphs:
            section = _leading_paragraphs(paragraphs, LONGEST_SECTION)
            paragraphs = paragraphs[section.count("\n\n") + 1 :]
            if len(section) >= 80:
                yield format_prompt("prose", heading), "\n\n" + section


def _paragraphs(body: str, reflow: bool = True) -> list[str]:
    """Paragraphs split at blank lines; `reflow` joins their lines and drops the common indentation."""
    blocks = [block for block in re.split(r"\n\s*\n", body) if block.strip()]
    return [" ".join(block.split()) if reflow else block.strip("\n") for block in blocks]


def _leading_paragraphs(paragraphs: list[str], longest: int) -> str:
    """As many whole paragraphs as fit into `longest` characters, at least one."""
    total, count = 0, 0
    for paragraph in paragraphs:
        total += len(paragraph) + 2
        if count and total > longest:
            break
        count += 1
    return "\n\n".join(paragraphs[:count])


_READERS = {
    "gsm8k_train.jsonl": _maths,
    "train_synthetic_maths.jsonl": _maths,
    "train_mbpp.jsonl": _mbpp,
    "train_python_algorithms.jsonl": _python_files,
    "train_python_stdlib.jsonl": _python_files,
    "train_jargon.jsonl": _jargon,
    "train_python_docs.jsonl": _python_docs,
}
