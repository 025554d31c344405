"""Record which experts a MoE target uses. Names are imported on first use: this module loads nothing."""

from ecospec.lazy import attributes

_HOMES = {
    "RoutingRecorder": "target.recorder",
    "TransformersEngine": "job.engine",
    "VllmEngine": "job.vllm",
    "check_folder": "store.check",
    "run_trace": "job.run",
}
__all__ = list(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
