"""Kinds that are found and not listed: each is a folder of a package, with one object `KIND` in its `kind.py`."""

import functools
import importlib
import pkgutil
from collections.abc import Iterable

from ecospec.errors import InputError


@functools.cache
def kinds_in(package: str) -> tuple:
    """The `KIND` of every folder of `package`, by their `order` and then by `name`; a `kind.py` loads nothing heavy."""
    path = importlib.import_module(package).__path__
    folders = [found.name for found in pkgutil.iter_modules(path) if found.ispkg]
    kinds = [importlib.import_module(f"{package}.{folder}.kind").KIND for folder in folders]
    return tuple(sorted(kinds, key=lambda kind: (kind.order, kind.name)))


class Found:
    """A kind that is found. `order`: its place in lists, the smallest first, and then by name."""

    order: int = 100

    @property
    def name(self) -> str:
        """The name of its folder."""
        return type(self).__module__.split(".")[-2]


def named(kinds: Iterable[Found], name: str, key: str) -> Found:
    """The one of `kinds` with this name. Raises InputError, naming the option `key`, when there is none."""
    known = {kind.name: kind for kind in kinds}
    if name not in known:
        raise InputError(f"--{key} {name}: is none of {', '.join(known)}")
    return known[name]
