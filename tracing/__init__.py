"""Record which experts a MoE target uses. Names are imported on first use: this module loads nothing."""

from typing import TYPE_CHECKING

from ecospec.lazy import offered

if TYPE_CHECKING:
    from ecospec.tracing.job.engine import TransformersEngine as TransformersEngine
    from ecospec.tracing.job.run import run_trace as run_trace
    from ecospec.tracing.job.vllm import VllmEngine as VllmEngine
    from ecospec.tracing.store.check import check_folder as check_folder
    from ecospec.tracing.target.recorder import RoutingRecorder as RoutingRecorder
else:
    __all__, __getattr__ = offered(__name__)
