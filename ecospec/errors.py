"""The two kinds of failure a command reports in one line instead of a traceback."""

import re
import textwrap
from collections.abc import Iterable

NAMED_BY_GROUP = ("name", "path")  # last parts of keys that say little: `target.name` is the argument `target`
OPTION = re.compile(r"(?<![\w-])--([\w.]*\w)")


class InputError(ValueError):
    """Bad input: the message names the file, key or line and the remedy. Commands exit with code 2.

    Messages name keys as options: `InputError("--selection.gamma 2: must be 1, or give --selection.joint")`. `as_typed`
    is that message, for users of the commands; `str` speaks of arguments, as Python users know them ("gamma 2: must be
    1, or give joint"). Where a caller may want to say it in other words, the fault's `key` and its `value` (None:
    nothing was given) are given apart, and the message is the rule alone.
    """

    def __init__(self, message: str, *, key: str | None = None, value: object = None) -> None:
        self.key, self.value, self.rule = key, value, message
        rule = OPTION.sub(lambda option: argument(option[1]), message)
        if key is not None:
            shown = repr(value) if isinstance(value, str) else value
            rule = f"{_headed(argument(key), shown)}: {rule}"
        super().__init__(rule)

    @property
    def as_typed(self) -> str:
        """The message for users of the commands."""
        return self.rule if self.key is None else f"{_headed(f'--{self.key}', self.value)}: {self.rule}"


class DamageError(RuntimeError):
    """Something on disk, or in what an engine returned, is not as it was written. Commands exit with code 1."""


def argument(key: str) -> str:
    """What Python users call a key: its last part, or its group's name where that part says little."""
    *groups, last = key.split(".")
    return groups[-1] if groups and last in NAMED_BY_GROUP else last


def brief(error: Exception) -> str:
    """Another library's message as one line of at most 200 characters, for use within one of ours."""
    return textwrap.shorten(str(error), 200, placeholder=" …")


def first_few(names: Iterable[object], shown: int = 3, separator: str = ", ") -> str:
    """The first `shown` of what a message lists, and how many more there are: `a, b, c and 348 more`."""
    every = [str(name) for name in names]
    rest = len(every) - shown
    return separator.join(every[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _headed(name: str, value: object) -> str:
    return name if value is None else f"{name} {value}"
