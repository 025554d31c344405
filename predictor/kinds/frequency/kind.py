"""The kind's object; see `ecospec.predictor.kinds.base`."""

from typing import TYPE_CHECKING

from ecospec.predictor.kinds.counted import CountedKind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.predictor.kinds.frequency.table import FrequencyTable


class FrequencyKind(CountedKind):
    """The same experts for every token, so selection falls back on EAGLE's rule."""

    order = 5

    def count(self, traces: "Traces", vocab_size: int) -> "FrequencyTable":
        """See `CountedKind`."""
        from ecospec.predictor.kinds.counting import count_shares
        from ecospec.predictor.kinds.frequency.table import FrequencyTable

        return FrequencyTable(count_shares(traces))


KIND = FrequencyKind()
