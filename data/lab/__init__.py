"""The shipped lab: weights, prompts, traces and trees as data; `build` and `recipe` remake them."""

from importlib import resources
from pathlib import Path

LAB = "lab"


def shipped(name: str | Path, part: str = "") -> Path | None:
    """The part of the shipped lab that a user's `name` stands for, None where it stands for something else.

    The word `lab` stands for `part` (`target`, `drafter`, `predictor`, `traces`, `trees`, …), `lab/PART` for that one.
    A folder of one's own that has such a name is `./lab`, or a Path.
    """
    word, _, own_part = str(name).partition("/")
    if isinstance(name, Path) or word != LAB:
        return None
    path = Path(str(resources.files(__name__))) / (own_part or part)
    return path if path.exists() else None
