"""Names that a package offers and imports on first use, so that the package itself loads nothing heavy."""

from collections.abc import Callable
from importlib import import_module


def attributes(package: str, homes: dict[str, str]) -> Callable[[str], object]:
    """A module-level `__getattr__` for `package`; `homes` maps each name to the submodule that defines it."""

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return attribute
