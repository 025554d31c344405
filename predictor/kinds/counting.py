"""What the kinds that are not trained share: each expert's share of its layer, and tables by token.

All are counts over the `train` samples. Of samples of another split they refuse to know anything.

Letters: B texts, N tree nodes, T tokens, P chosen (layer, expert) pairs, L MoE layers, E experts, K experts per token,
U distinct tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec.data.traces import Trace, Traces, TraceSet, read_traces
from ecospec.errors import InputError
from ecospec.inference.footprints import Stateless, as_footprints
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.base import Baseline
from ecospec.predictor.objective.loss import CHUNK_TOKENS
from ecospec.predictor.objective.metrics import top_experts
from ecospec.tracing.target.loading import check_moe


@dataclass(frozen=True)
class ExpertShares:
    """`share_LE` is each expert's share of its layer's choices (sums to 1, none is zero); `top_k` is K."""

    share_LE: np.ndarray
    top_k: int

    def fill(self, counts_TLE: np.ndarray) -> Tensor:
        """log shares [T, L, E] of counts to which one token's worth of choices is added.

        An expert's share is at most 1/K, so what is added never outweighs one count: it breaks ties and fills gaps.
        """
        smoothed_TLE = counts_TLE + self.top_k * self.share_LE
        return torch.from_numpy(np.log(smoothed_TLE / smoothed_TLE.sum(-1, keepdims=True)))


@dataclass(frozen=True)
class ExpertTable(ABC):
    """Says the experts of a token from its id alone."""

    shares: ExpertShares

    @abstractmethod
    def logits(self, input_ids_T: np.ndarray) -> Tensor:
        """log probabilities [T, L, E], up to a constant of each token and layer."""

    def predict(self, input_ids_T: np.ndarray) -> np.ndarray:
        """Expert ids [T, L, K], ascending."""
        return top_experts(self.logits(input_ids_T), self.shares.top_k).numpy()


class TableFootprints(Stateless):
    """Footprints from a table: they depend on the node's token alone."""

    def __init__(self, table: ExpertTable) -> None:
        self.table = table

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        tokens_BN = trees.tokens_BN
        tokens_U, place_X = np.unique(tokens_BN.cpu().numpy(), return_inverse=True)
        experts_ULK = torch.from_numpy(self.table.predict(tokens_U)).long()
        footprints_ULE = as_footprints(experts_ULK, self.table.shares.share_LE.shape[-1])
        return footprints_ULE[torch.from_numpy(place_X.reshape(tokens_BN.shape))].to(tokens_BN.device)


def table_baseline(table: ExpertTable, nodes: int) -> Baseline:
    """A table as evaluation measures it."""
    ids_N = np.zeros(nodes, np.int32)
    return Baseline(lambda item: map(table.logits, stretches(item.input_ids)), lambda: table.predict(ids_N))


def count_shares(traces: Traces) -> ExpertShares:
    """Count the experts of each layer over the `train` samples. Raises InputError when there are none."""
    L, E, K = traces.num_layers, traces.num_experts, traces.top_k
    counts_LE, tokens = np.zeros(L * E, np.int64), 0
    for item in training_samples(traces):
        counts_LE += np.bincount(pairs_TP(item, E).ravel(), minlength=L * E)
        tokens += len(item.input_ids)
    share_LE = (counts_LE.reshape(L, E) + K / E) / (K * (tokens + 1))  # one even token on top: no share is zero
    return ExpertShares(share_LE, K)


def training_samples(traces: Traces) -> Iterator[Trace]:
    """The `train` samples. Raises InputError when there are none."""
    found = False
    for item in traces:
        if item.split == "train":
            found = True
            yield item
    if not found:
        raise InputError("--traces: it has no train samples to count; trace more samples")


def pairs_TP(item: Trace, num_experts: int) -> np.ndarray:
    """The chosen (layer, expert) pairs of each token as layer · E + expert, [T, L·K]."""
    T, L, _ = item.experts.shape
    return (item.experts.astype(np.int64) + num_experts * np.arange(L)[:, None]).reshape(T, -1)


def stretches(values_T: np.ndarray) -> list[np.ndarray]:
    """A sample's values in pieces of at most `CHUNK_TOKENS` tokens."""
    return [values_T[first : first + CHUNK_TOKENS] for first in range(0, len(values_T), CHUNK_TOKENS)]


def open_traces(path: str | None, counts: tuple[int, int, int], config_sha256: str | None = None) -> TraceSet:
    """The traces that tables are counted from, of the target with this (L, E, K) and configuration hash.

    Raises InputError when there are none or they are another target's.
    """
    if path is None:
        raise InputError("--selection.footprints: these are counted from traces; give --traces DIR")
    traces = read_traces(path)
    check_moe(f"--traces {path}", (traces.num_layers, traces.num_experts, traces.top_k), counts)
    recorded = traces.manifest.target
    if config_sha256 not in (None, recorded.config_sha256):
        raise InputError(f"--traces {path}: recorded on {recorded.name}, another target; trace this one")
    return traces
