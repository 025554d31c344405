"""The configurations that come with the package, as files. Knows nothing of parsers."""

from importlib import resources
from pathlib import Path

from ecospec.errors import InputError


def shipped_root() -> Path:
    """The folder that holds them, one sub-folder for each target."""
    return Path(str(resources.files("ecospec.configs")))


def shipped_config(name: str) -> Path:
    """The file of a shipped configuration such as `lab/trace`, or of a path. Raises InputError when there is none."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_root() / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    known = ", ".join(sorted(str(p.relative_to(shipped_root()))[:-5] for p in shipped_root().glob("*/*.yaml")))
    raise InputError(f"--config {name}: no such file, and no shipped configuration of that name (there are: {known})")
