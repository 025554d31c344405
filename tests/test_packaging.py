"""A wheel has what users need and runs where the repository is not; a checkout tests itself, whatever is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.test_repository import FOLDERS, ROOT

RECIPE = "ecospec/data/lab/recipe/"
SELF_TEST = """
import subprocess, sys
from pathlib import Path

import ecospec.configs.schema

HERE = Path(__file__).resolve().parent.parent
FILE = "import ecospec.configs.schema as schema; print(schema.__file__)"


def test_it_is_this_checkout_that_is_imported(tmp_path):
    found = subprocess.run([sys.executable, "-c", FILE], cwd=tmp_path, capture_output=True, text=True, check=True)
    for file in (ecospec.configs.schema.__file__, found.stdout.strip()):
        assert Path(file).resolve() == HERE / "configs" / "schema.py"
"""


def copy_of_the_repository(path: Path, *ignored: str) -> Path:
    """What is installed from: the package folder with its links, the folders behind them, and their description."""
    for name in ("ecospec", *FOLDERS):
        shutil.copytree(ROOT / name, path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", *ignored))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, path)
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_of_the_repository(folder / "source")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, source], check=True, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    site = wheel.parent / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(command, check=True)
    return site


def run_installed(site: Path, *words: str) -> subprocess.CompletedProcess:
    """Run Python outside the repository; -S leaves out .pth files, and with them the editable install."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")])}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, check=False)


def test_a_wheel_has_all_rooms_and_data_and_not_the_recipe_of_the_lab(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ecospec/")}
    files = {f"ecospec/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "ecospec").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {name for name in files if not name.startswith(RECIPE)}
    assert not [name for name in names if name.startswith(RECIPE)]
    configurations = {f"ecospec/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert names >= configurations | {"ecospec/py.typed", "ecospec/data/lab/target/model.safetensors"}


def test_a_wheel_installed_elsewhere_runs(installed: Path) -> None:
    code = "import sys; from ecospec.inference.cli import main; sys.exit(main(['check', '--config', 'lab/decode']))"
    result = run_installed(installed, "-c", code)
    assert result.returncode == 0, result.stderr
    assert "everything fits" in result.stdout
    assert str(ROOT) not in result.stdout
    assert str(installed) in result.stdout


def test_without_its_recipe_the_lab_is_not_rebuilt_and_one_line_says_why(installed: Path) -> None:
    result = run_installed(installed, "-m", "ecospec.data.lab.build")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "the lab's recipe is not part of an installed package: run this in a checkout of the repository"
    ]


def test_another_checkout_tests_itself(tmp_path: Path) -> None:
    copy_of_the_repository(tmp_path, "lab")
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_self.py").write_text(SELF_TEST)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_self.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
