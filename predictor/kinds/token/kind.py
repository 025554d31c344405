"""The kind's object; see `ecospec.predictor.kinds.base`."""

from typing import TYPE_CHECKING

from ecospec.predictor.kinds.counted import CountedKind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.predictor.kinds.token.table import TokenTable


class TokenKind(CountedKind):
    """The best that costs nothing."""

    order = 6
    yardstick = True

    def count(self, traces: "Traces", vocab_size: int) -> "TokenTable":
        """See `CountedKind`."""
        from ecospec.predictor.kinds.token.table import count_tokens

        return count_tokens(traces, vocab_size)


KIND = TokenKind()
