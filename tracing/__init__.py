"""Record which experts a MoE target uses. Names are imported on first use: this module loads nothing."""

import importlib

_EXPORTS = {
    "RoutingRecorder": "ecospec.tracing.recorder",
    "TransformersEngine": "ecospec.tracing.engine",
    "check_folder": "ecospec.tracing.check",
    "run_trace": "ecospec.tracing.run",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
