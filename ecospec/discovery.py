"""Kinds that are found and not listed: each is a folder of a package, with one object `KIND` in its `kind.py`."""

import functools
import importlib
import pkgutil


@functools.cache
def kinds_in(package: str) -> tuple:
    """The `KIND` of every folder of `package`, by their `order` and then by `name`; a `kind.py` loads nothing heavy."""
    path = importlib.import_module(package).__path__
    folders = [found.name for found in pkgutil.iter_modules(path) if found.ispkg]
    kinds = [importlib.import_module(f"{package}.{folder}.kind").KIND for folder in folders]
    return tuple(sorted(kinds, key=lambda kind: (kind.order, kind.name)))
