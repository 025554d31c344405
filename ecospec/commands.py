"""The three console scripts. Imports nothing heavy, so that Ctrl-C is one line from the first moment on."""

import sys
from importlib import import_module


def trace() -> int:
    return _run("ecospec-trace", "ecospec.tracing.cli")


def train() -> int:
    return _run("ecospec-train", "ecospec.predictor.cli")


def decode() -> int:
    return _run("ecospec-decode", "ecospec.inference.cli")


def _run(prog: str, module: str) -> int:
    """The exit code of the command whose `main` is in `module`."""
    try:
        return import_module(module).main()
    except KeyboardInterrupt:  # while `module` itself was loading; later ones are its own to report
        sys.stderr.write(f"{prog}: interrupted\n")
        return 130
