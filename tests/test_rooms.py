"""The rooms and what is written of them agree: sizes, layers, docstrings, README, documentation."""

import ast
import importlib
import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest

from tests.test_repository import FOLDERS, ROOT

FILES = sorted(path for folder in ("ecospec", *FOLDERS) for path in (ROOT / folder).rglob("*.py"))
ROOMS = [path.parent for path in FILES if path.name == "__init__.py"]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LARGEST_ROOM = 14
NAME = re.compile(r"\becospec(?:\.[a-z_]\w*)+", re.IGNORECASE)
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(('ecospec', 'tests', 'docs', *FOLDERS))})/[\w./*-]*")
ENTRY = re.compile(r"[\w.-]+(?:/|\.\w+)$")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """`ecospec.tracing.config` of `tracing/config.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["ecospec", *(part for part in parts if part not in ("ecospec", "__init__"))])


def docstrings(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    return "\n".join(filter(None, found))


def exists(name: str) -> bool:
    """Whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            reduce(getattr, parts[length:], module)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("room", ROOMS, ids=shown)
def test_a_room_is_small_enough_to_be_seen_at_a_glance(room: Path) -> None:
    assert len([path for path in FILES if path.parent == room and path.name != "__init__.py"]) <= LARGEST_ROOM


def test_every_module_has_its_place_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name for layer in layers for name in re.split(r"\s*[|:]\s*", layer)}
    assert placed <= {module_of(path) for path in FILES}
    for path in FILES:
        name = module_of(path)
        above = path.name == "__init__.py" and any(place.startswith(f"{name}.") for place in placed)
        assert above or any(f"{name}.".startswith(f"{place}.") for place in placed), name


@pytest.mark.parametrize("path", [*DOCUMENTS, *FILES], ids=shown)
def test_every_name_that_is_written_of_exists(path: Path) -> None:
    text = docstrings(path) if path.suffix == ".py" else path.read_text()
    assert not [name for name in set(NAME.findall(text)) if not exists(name)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    named = {name.rstrip(".") for name in PATH.findall(path.read_text())}
    assert not [name for name in named if not any(ROOT.glob(name))]


def listed() -> dict[str, str]:
    """The entries of the tree in the README, as paths, with what is said of each; several may share a line."""
    _, rest = (ROOT / "README.md").read_text().split("## The files\n")
    entries, folders = {}, []
    for line in rest.split("```")[1].strip("\n").split("\n"):
        words, names = line.split(), []
        while words and ENTRY.match(words[0]):
            names.append(words.pop(0))
        folders = folders[: (len(line) - len(line.lstrip())) // 2]
        entries |= {"".join([*folders, name]): " ".join(words) for name in names}
        folders += [name for name in names if name.endswith("/")]
    return entries


def test_the_readme_lists_every_file_of_the_product_with_a_phrase_and_none_that_is_not_there() -> None:
    entries = listed()
    assert {name for name in entries if name.endswith(".py")} == {
        shown(path) for path in FILES if path.name != "__init__.py"
    }
    assert not [name for name in entries if not (ROOT / name).exists()]
    assert not [name for name, phrase in entries.items() if not phrase]
    assert {name.rstrip("/") for name in entries if name.endswith("/")} >= {shown(room) for room in ROOMS}
