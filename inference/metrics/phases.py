"""The parts of a decoding step, in the order in which they happen: how they are named, explained and drawn."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """`name`: what the loop's clock calls it; `color`: of its bars on a light page and on a dark one."""

    name: str
    label: str
    definition: str
    color: tuple[str, str]

    @property
    def key(self) -> str:
        """Its key in files, and its class in the page's style sheet."""
        return f"t_{self.name}"


PHASES = (
    Phase("draft", "draft", "seconds per step to grow the draft tree", ("#d98a29", "#e0a45a")),
    Phase(
        "predict", "predict experts", "seconds per step to predict the experts of its tokens", ("#0b6cb5", "#5eb3f0")
    ),
    Phase("select", "select", "seconds per step to choose which of its tokens to verify", ("#a8438f", "#e08fca")),
    Phase("verify", "verify", "seconds per step of the target's own pass", ("#8796a5", "#66788a")),
    Phase("accept", "accept", "seconds per step to accept tokens and compact the cache", ("#00806a", "#35c3a3")),
)
OTHER = Phase("other", "other", "what remains of the measured step", ("#c4c8c4", "#484e54"))  # no clock's own
STEP_KEY = "t_step"  # the whole step


def style_sheet() -> str:
    """CSS rules that fill a bar of each phase's class with its color."""
    return "\n".join(f".{p.key} {{ fill: light-dark({', '.join(p.color)}); }}" for p in (*PHASES, OTHER))
