"""Benchmark prompts, trace reading and the lab. Names are imported on first use: this module loads nothing."""

import importlib

_EXPORTS = {
    "Prompt": "ecospec.data.prompts",
    "read_prompts": "ecospec.data.prompts",
    "Trace": "ecospec.data.traces",
    "TraceSet": "ecospec.data.traces",
    "read_traces": "ecospec.data.traces",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
