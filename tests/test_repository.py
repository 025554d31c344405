"""Laws of the repository itself: imports, configurations, sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ecospec.configs import cli
from ecospec.inference.config import DecodeConfig
from ecospec.predictor.config import TrainConfig
from ecospec.tracing.config import TraceConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tracing", "data", "predictor", "inference", "configs")
SOURCES = sorted(path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))
SCHEMAS = {
    "trace": TraceConfig,
    "predictor": TrainConfig,
    "drafter": TrainConfig,
    "demo": DecodeConfig,
    "decode": DecodeConfig,
    "ladder": DecodeConfig,
}


def imported_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_a_bare_folder_name(path):
    assert not imported_names(ast.parse(path.read_text())) & set(FOLDERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_parses(path):
    config, _ = cli.parse("ecospec", SCHEMAS[path.stem], ["--config", str(path)])
    by_name, _ = cli.parse("ecospec", SCHEMAS[path.stem], ["--config", f"{path.parent.name}/{path.stem}"])
    assert config == by_name


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
