"""Laws of footprint kinds: each is one folder, and nothing outside of it knows its name."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecospec.errors import InputError
from ecospec.predictor.kinds import all_kinds, kind_named, trained_kind, trained_kinds, yardstick
from ecospec.predictor.kinds.base import FootprintOptions

ROOT = Path(__file__).resolve().parent.parent
KINDS = ROOT / "predictor" / "kinds"
ROOMS = ("configs", "data", "ecospec", "inference", "predictor", "tracing")
LAB = ROOT / "data" / "lab"  # its recipe trains and ships some of the kinds by name
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if LAB not in path.parents)
NAMES = [kind.name for kind in all_kinds()]
GENERAL = ("predictor",)  # a word of its own right
PUBLIC = ROOT / "predictor" / "__init__.py"  # offers a kind's model to users


def words(path: Path) -> Iterator[str]:
    """Strings, identifiers and imported modules of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str) and "_" in value:  # `token` and `frequency` are words of every day
                yield value


def names_kind(word: str, name: str) -> bool:
    """Whether a word is the kind's name, its folder, or holds the name where that means nothing else."""
    in_folder = re.search(rf"\bkinds\.{name}\b", word) is not None
    return word == name or in_folder or ("_" in name and re.search(rf"\b{name}\b", word) is not None)


def test_the_kinds_are_the_folders():
    folders = {path.parent.name for path in KINDS.glob("*/__init__.py")}
    assert set(NAMES) == folders and len(NAMES) == len(folders)
    for kind in all_kinds():
        assert (KINDS / kind.name / "kind.py").is_file()
        assert kind_named(kind.name) is kind


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GENERAL])
def test_the_name_of_a_kind_occurs_in_its_own_folder_only(name):
    outside = [path for path in PRODUCT if KINDS / name not in path.parents]
    found = {str(path.relative_to(ROOT)): word for path in outside for word in words(path) if names_kind(word, name)}
    assert not found


def test_nothing_outside_imports_from_a_kinds_folder():
    for name in NAMES:
        for path in PRODUCT:
            if KINDS / name not in path.parents and path != PUBLIC:
                assert not any(word.startswith(f"ecospec.predictor.kinds.{name}.") for word in words(path)), path


def test_all_kinds_are_known_without_torch():
    code = (
        "import sys; from ecospec.predictor.kinds import all_kinds; names = [k.name for k in all_kinds()]\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); print(*names)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == NAMES


def test_a_kind_is_trained_or_counted_or_neither_and_has_what_that_takes():
    assert [kind.name for kind in trained_kinds()] == ["predictor", "linear", "draft_mlp"]
    for kind in all_kinds():
        assert not (kind.trained and kind.counted)
        assert (kind.column is not None) == kind.trained
        assert (kind.replay_source(None, 4, 8) is None) == (kind.trained or kind.counted)
    columns = [kind.column for kind in trained_kinds()]
    assert columns == ["experts_pred", "experts_linear", "experts_draft_mlp"]  # those of files that exist
    assert len({kind.model_type for kind in trained_kinds()}) == len(trained_kinds())
    assert all(kind.model_class.config_class.model_type == kind.model_type for kind in trained_kinds())
    assert not yardstick().trained


def test_unknown_names_are_refused_with_those_that_there_are():
    with pytest.raises(InputError, match=r"footprints oracles: is none of predictor, linear"):
        kind_named("oracles")
    with pytest.raises(InputError, match="kind token: is none of predictor, linear, draft_mlp"):
        trained_kind("token")


@pytest.mark.parametrize("kind", [kind for kind in all_kinds() if kind.trained or kind.counted], ids=lambda k: k.name)
def test_what_a_kind_is_made_from_must_be_given(kind):
    with pytest.raises(InputError, match="predictor" if kind.trained else "traces"):
        kind.inspect(FootprintOptions(), None if kind.trained else shape(), "", None)


def shape():
    from ecospec.tracing.target.loading import MoeShape

    return MoeShape("qwen3_moe", (0,), 4, 2, 8, 16, 1)
