"""The two kinds of failure a command reports in one line instead of a traceback."""


class InputError(ValueError):
    """Bad input: the message names the file, key or line and the remedy. Commands exit with code 2."""


class DamageError(RuntimeError):
    """Something on disk, or in what an engine returned, is not as it was written. Commands exit with code 1."""
