"""Benchmark prompts, trace reading and the lab. Names are imported on first use: this module loads nothing."""

from ecospec.lazy import attributes

_HOMES = {
    "Prompt": "prompts",
    "read_prompts": "prompts",
    "Trace": "traces",
    "TraceSet": "traces",
    "read_traces": "traces",
}
__all__ = list(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
