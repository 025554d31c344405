"""What a footprint kind is: one folder of `ecospec.predictor.kinds`, whose `kind.py` has one object `KIND`.

The folder's name is the kind's name, in `--selection.footprints`, `--kind`, results and metrics. Importing a `kind.py`
loads no torch: methods import what they need. Three families: `TrainedKind` (a model in an exported folder),
`CountedKind` (a table counted from traces), and kinds that are read off the target's own passes (`Kind` itself).

Letters: T tokens, t of them consecutive, N tree nodes, L MoE layers, E experts, K experts per token, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ecospec.discovery import Found

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ecospec.data.traces import Trace, Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.tracing.target.loading import MoeShape, Target


@dataclass(frozen=True)
class FootprintOptions:
    """Where a method says that its footprints come from; each kind reads its own part.

    `path` is `--predictor.path`: the folder of a trained model, `lab` for the shipped one. `traces` is `--traces`: the
    folder that tables are counted from.
    """

    path: str | None = None
    traces: str | None = None


@dataclass(frozen=True)
class Baseline:
    """What evaluation measures of a kind that is not trained.

    `logits_of` gives logits [t, L, E] of a sample's consecutive stretches; `step` predicts one step's draft tree, to be
    timed.
    """

    logits_of: Callable[["Trace"], Iterable["Tensor"]]
    step: Callable[[], object]


class Kind(Found):
    """A footprint kind: it is inspected (`ecospec-decode check`), loaded, and turned into sources for the loop.

    `trained`: a model in an exported folder, recorded in tree files; `counted`: a table counted from traces; neither:
    known from the target's passes. Lists and files follow `order`.
    """

    trained: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    yardstick: ClassVar[bool] = False  # the one that `ecospec-train generalise` sets beside every model

    @property
    def column(self) -> str | None:
        """The column of a tree file with its recorded experts; None where replay works them out by itself."""
        return f"experts_{self.name}" if self.trained else None

    def folder(self, path: str | None) -> Path | None:
        """The exported folder at `--predictor.path`; None for a kind that has none.

        Raises InputError where a trained kind's folder is not given, or is none.
        """
        return None

    def inspect(self, options: FootprintOptions, shape: "MoeShape", config_sha256: str, hidden: int | None) -> str:
        """One line for `ecospec-decode check`, from configurations and headers alone: no weights are read.

        `shape` and `config_sha256` are the target's; `hidden`: width of the hidden input of the method's draft head,
        None where its drafter has none. Raises InputError when the footprints are made for another target or drafter.
        """
        raise NotImplementedError

    def load(self, options: FootprintOptions, target: "Target") -> Any:
        """What the sources of several methods may share: a model on the target's embeddings and device, a table.

        Equal `options` give equal results, so load once. Raises InputError when it does not fit the target.
        """
        raise NotImplementedError

    def check_head(self, loaded: Any, head: "nn.Module | None", depth: int) -> None:
        """Raise InputError where `loaded` reads another draft head than `head`, or drafts less deep than `depth`.

        `head` is the draft head of the method (None: its drafter has none), `depth` how deep its drafts go at most.
        """

    def source(self, loaded: Any) -> "FootprintSource":
        """A footprint source of one method's own, from what `load` returned."""
        raise NotImplementedError

    def replay_source(self, traces: "Traces | None", num_experts: int, vocab_size: int) -> "FootprintSource | None":
        """The source as replay can have it, from `traces` and a tree file, without target or model.

        None where it cannot: a trained kind (its footprints were recorded), or a counted one without traces. The source
        is asked for many positions at once, as a batch of texts that are their roots alone; `routed` holds the experts
        [1, L, K] of each position's token before the root, -1 where the file does not say.
        """
        return None

    def baseline(self, traces: "Traces", vocab_size: int, nodes: int) -> Baseline | None:
        """What a trained model must beat, counted from the `train` samples of `traces`; None for a trained kind.

        `nodes`: size of the tree that `Baseline.step` predicts for. Raises InputError without `train` samples.
        """
        return None
