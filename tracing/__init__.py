"""Record which experts a MoE target uses. Names are imported on first use: this module loads nothing."""

from ecospec.configs.lazy import attributes

_HOMES = {
    "RoutingRecorder": "recorder",
    "TransformersEngine": "engine",
    "VllmEngine": "vllm",
    "check_folder": "check",
    "run_trace": "run",
}
__all__ = list(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
