"""Laws of the repository itself: imports, configurations, sizes."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ecospec.configs import cli
from ecospec.inference.cli import SUBCOMMANDS as DECODE
from ecospec.predictor.cli import SUBCOMMANDS as TRAIN
from ecospec.tracing.cli import SUBCOMMANDS as TRACE

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tracing", "data", "predictor", "inference", "configs")
SOURCES = sorted(path for folder in ("ecospec", *FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))
COMMANDS = {"trace": TRACE, "predictor": TRAIN, "drafter": TRAIN, "demo": DECODE, "decode": DECODE, "ladder": DECODE}


def imported_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_a_bare_folder_name_or_relatively(path):
    assert not imported_names(ast.parse(path.read_text())) & {*FOLDERS, "."}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_serves_all_subcommands_of_its_command(path):
    commands = COMMANDS[path.stem]
    for command in commands:
        folders = ["DIR"] if command.folders else []
        for name in (str(path), f"{path.parent.name}/{path.stem}"):
            cli.parse("ecospec", command.schema, [*folders, "--config", name], command.folders, commands)


@pytest.mark.parametrize("module", ["tracing", "predictor", "inference"])
def test_help_does_not_wait_for_torch(module):
    code = (
        f"import sys; from ecospec.{module}.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    command = {"tracing": "run", "predictor": "predictor", "inference": "eval"}[module]
    result = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--target.name" in result.stdout


def distribution(text: str) -> str:
    """The name at the start of a requirement, as package indexes compare it."""
    return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")


def test_what_the_product_imports_is_declared_and_what_is_declared_is_pinned():
    declared = {*map(distribution, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])}
    pinned = {distribution(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"}
    product = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    product += (ROOT / "ecospec").glob("*.py")
    imported = set().union(*(imported_names(ast.parse(path.read_text())) for path in product))
    homes = importlib.metadata.packages_distributions()
    for name in imported - sys.stdlib_module_names - {"ecospec"}:
        assert declared & {*map(distribution, homes[name])}, name
    assert declared <= pinned
