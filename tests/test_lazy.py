"""Packages offer their names without loading what is behind them."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["tracing", "predictor", "inference", "data"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_a_package_offers_is_there(package: str) -> None:
    module = importlib.import_module(f"ecospec.{package}")
    assert module.__all__
    assert {name: getattr(module, name).__name__ for name in module.__all__} == {name: name for name in module.__all__}
    with pytest.raises(AttributeError, match="absent"):
        module.absent  # noqa: B018 - the look-up is the point


def test_importing_the_packages_loads_no_torch() -> None:
    code = f"import sys, {', '.join(f'ecospec.{package}' for package in PACKAGES)}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
