"""Laws of drafter kinds: each is one folder, and nothing outside of it knows its name."""

import ast
from pathlib import Path

import pytest

from ecospec.errors import InputError
from ecospec.inference.config import DrafterConfig
from ecospec.inference.drafters.kind import DrafterKind, drafter_kind, drafter_kinds

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "inference" / "drafters"
ROOMS = ("configs", "data", "ecospec", "inference", "predictor", "tracing")
LAB = ROOT / "data" / "lab"  # its recipe ships a head by name
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if LAB not in path.parents)
NAMES = [kind.name for kind in drafter_kinds()]


def names_written(path: Path) -> set[str]:
    """String literals and keyword names; parts of import paths, and of longer names, are none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return literals | {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_kind_occurs_in_its_own_folder_only(name):
    assert (HOME / name / "kind.py").is_file()
    outside = [path for path in PRODUCT if HOME / name not in path.parents]
    assert not [str(path.relative_to(ROOT)) for path in outside if name in names_written(path)]


def test_the_count_would_notice_a_name(tmp_path):
    (tmp_path / "a.py").write_text('kind = "mtp"\n')
    assert "mtp" in names_written(tmp_path / "a.py")


def test_kinds_are_the_folders_and_the_first_is_the_default():
    assert set(NAMES) == {path.parent.name for path in HOME.glob("*/kind.py")}
    assert all(isinstance(kind, DrafterKind) and drafter_kind(kind.name) is kind for kind in drafter_kinds())
    assert DrafterConfig().kind == NAMES[0]
    with pytest.raises(InputError, match=f"kind nothing: is none of {NAMES[0]}"):
        drafter_kind("nothing")
