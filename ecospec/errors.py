"""The two kinds of failure a command reports in one line instead of a traceback."""

import textwrap
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: the message names the file, key or line and the remedy. Commands exit with code 2."""


class DamageError(RuntimeError):
    """Something on disk, or in what an engine returned, is not as it was written. Commands exit with code 1."""


def brief(error: Exception) -> str:
    """Another library's message as one line of at most 200 characters, for use within one of ours."""
    return textwrap.shorten(str(error), 200, placeholder=" …")


def first_few(names: Iterable[object], shown: int = 3, separator: str = ", ") -> str:
    """The first `shown` of what a message lists, and how many more there are: `a, b, c and 348 more`."""
    every = [str(name) for name in names]
    rest = len(every) - shown
    return separator.join(every[:shown]) + (f" and {rest} more" if rest > 0 else "")
