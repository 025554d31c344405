"""Benchmark prompts, trace reading and the lab. Names are imported on first use: this module loads nothing."""

from typing import TYPE_CHECKING

from ecospec.lazy import offered

if TYPE_CHECKING:
    from ecospec.data.prompts import Prompt as Prompt
    from ecospec.data.prompts import read_prompts as read_prompts
    from ecospec.data.traces import Trace as Trace
    from ecospec.data.traces import TraceSet as TraceSet
    from ecospec.data.traces import read_traces as read_traces
else:
    __all__, __getattr__ = offered(__name__)
