"""Names that a package offers and imports on first use, so that the package itself loads nothing heavy.

The package lists them once, as imports under `if TYPE_CHECKING:`. Type checkers read them there, and so do we.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module


def offered(package: str) -> tuple[list[str], Callable[[str], object]]:
    """`__all__` and `__getattr__` of `package`, for the `else` of the `if TYPE_CHECKING:` at the top of its module."""
    homes = _imported(inspect.getsource(sys.modules[package]))

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return sorted(homes), attribute


def _imported(source: str) -> dict[str, str]:
    """Each name that is imported under `if TYPE_CHECKING:`, and the module that it comes from."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {name.name: line.module for line in imports for name in line.names}
