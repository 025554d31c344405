"""A kind is one folder: its name is written nowhere else in the product, and it can be inspected, built and loaded."""

import ast
from pathlib import Path

import pytest

from ecospec.discovery import kinds_in
from ecospec.inference.drafters.kind import DrafterKind, drafter_kinds
from ecospec.predictor.kinds import all_kinds
from ecospec.predictor.kinds.base import Kind

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tracing", "predictor", "inference", "configs", "data", "ecospec/report")
HOMES = {"ecospec.inference.drafters": "inference/drafters", "ecospec.predictor.kinds": "predictor/kinds"}
TOO_GENERAL = {"predictor"}  # the name of a room, of a group of keys and of a kind
KINDS = [(home, kind.name) for home in HOMES for kind in kinds_in(home) if kind.name not in TOO_GENERAL]


def product_files() -> list[Path]:
    """Python files of the product; the lab's recipe, which names what it makes, is none."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")] + list((ROOT / "ecospec").glob("*.py"))
    return [path for path in found if "lab" not in path.relative_to(ROOT).parts]


def names_written(path: Path) -> set[str]:
    """String literals and keyword names; parts of import paths are none."""
    tree = ast.parse(path.read_text())
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return literals | {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}


@pytest.mark.parametrize(("home", "name"), KINDS)
def test_a_kind_is_named_in_its_own_folder_only(home, name):
    own = ROOT / HOMES[home] / name
    assert (own / "kind.py").is_file()
    elsewhere = [str(path.relative_to(ROOT)) for path in product_files() if own not in path.parents]
    written = [path for path in elsewhere if name in names_written(ROOT / path)]
    assert not written


def test_the_count_would_notice_a_name(tmp_path):
    (tmp_path / "a.py").write_text('kind = "mtp"\n')
    assert "mtp" in names_written(tmp_path / "a.py")


@pytest.mark.parametrize(("kinds", "base"), [(drafter_kinds, DrafterKind), (all_kinds, Kind)])
def test_kinds_are_found_in_a_fixed_order_under_the_names_of_their_folders(kinds, base):
    found = kinds()
    assert len({kind.name for kind in found}) == len(found) > 3
    assert all(isinstance(kind, base) for kind in found)
    assert [kind.order for kind in found] == sorted(kind.order for kind in found)
