"""Where the expert footprint of a draft node comes from: a trained model, a table, or the token before the root.

A source turns texts and their draft trees into footprints bool [B, N, L, E]: which experts each node is expected to use
in each MoE layer.

Letters: B texts, T tokens of a text (root last), N tree nodes (root first), n new tokens of a text, L MoE layers,
E experts, K experts per token, S cached slots, H hidden width of a draft head, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.masks import additive, seen_past
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.kinds.tables import FrequencyPredictor, TokenPredictor
from ecospec.predictor.objective.metrics import top_experts


class FootprintSource(Protocol):
    """What the decoding loop asks of a source. One with `needs_hidden = True` gets trees that have `hidden_BNH`."""

    def reset(self, rows: int) -> None:
        """`rows` new texts begin."""

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None) -> Tensor:
        """bool [B, N, L, E]; called once a step, with texts that grow.

        `texts` int64 [T], roots last; `routed` [n, L, K]: the target's own experts at the n positions before the root
        that are new since the last call, a text each (-1: none); None where nothing routed.
        """

    def keep_rows(self, rows: list[int]) -> None:
        """The other texts have ended."""


def needs_hidden(source: FootprintSource | None) -> bool:
    """Whether a source is fed the draft head's hidden input."""
    return getattr(source, "needs_hidden", False)


class PredictorFootprints:
    """The trained predictor with its own cache: one forward a step over the new tokens and the whole trees."""

    def __init__(self, predictor: ExpertPredictor) -> None:
        self.predictor = predictor
        self.reset(1)

    def reset(self, rows: int) -> None:
        self.cache = RowCache(lengths=[0] * rows)

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)

    @torch.inference_mode()
    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E]: the K likeliest experts of each node and layer (paper equation 4)."""
        return likeliest(self.logits(texts, trees), self.predictor.config.num_experts_per_tok)

    def logits(self, texts: list[Tensor], trees: DraftTrees) -> Tensor:
        """Routing logits [B, N, L, E] of every node; the texts' tokens stay in the cache, the drafts do not."""
        if self.cache.width == 0:
            self._read([ids_T[:-1] for ids_T in texts])
        new = [ids_T[length:] for ids_T, length in zip(texts, self.cache.lengths, strict=True)]
        counts, ids_Bn, drafts = [len(ids) for ids in new], pad_sequence(new, batch_first=True), trees.width - 1
        device = ids_Bn.device
        lengths_B, new_B = self.cache.lengths_B(device), torch.tensor(counts, device=device)
        n = ids_Bn.shape[1]
        after_BN = torch.arange(n, device=device).expand(len(new), -1)
        after_BN = torch.cat([after_BN, new_B[:, None] - 1 + trees.depth_BN[:, 1:]], dim=1)
        seen = torch.cat(
            [seen_past(lengths_B, self.cache.width, after_BN), _seen_new(new_B, n, trees.ancestors_BNN)], -1
        )
        logits = self.predictor(
            torch.cat([ids_Bn, trees.tokens_BN[:, 1:]], dim=1),
            cache=self.cache.cache,
            attention_mask=additive(seen, self.predictor.dtype),
            position_ids=lengths_B[:, None] + after_BN,
        )
        self.cache.keep_first(counts, n + drafts)
        roots = logits[torch.arange(len(new)), new_B - 1][:, None]
        return torch.cat([roots, logits[:, n:]], dim=1)

    def _read(self, texts: list[Tensor]) -> None:
        """The beginning of the texts, causally, as padding behind them is dropped."""
        counts = [len(ids_T) for ids_T in texts]
        if min(counts):
            self.predictor(pad_sequence(texts, batch_first=True), cache=self.cache.cache)
            self.cache.keep_first(counts, max(counts))


def _seen_new(new_B: Tensor, n: int, ancestors_BNN: Tensor) -> Tensor:
    """bool [B, n + N - 1, n + N - 1]: new tokens see each other causally, drafts the text's own and their ancestors."""
    B, N = ancestors_BNN.shape[:2]
    index_n = torch.arange(n, device=new_B.device)
    seen = torch.zeros(B, n + N - 1, n + N - 1, dtype=torch.bool, device=new_B.device)
    seen[:, :n, :n] = index_n <= index_n[:, None]
    seen[:, n:, :n] = (index_n < new_B[:, None])[:, None]
    seen[:, n:, n:] = ancestors_BNN[:, 1:, 1:]
    return seen


class Stateless:
    """The part of a `FootprintSource` that remembers nothing from step to step."""

    def reset(self, rows: int) -> None:
        """Nothing to forget."""

    def keep_rows(self, rows: list[int]) -> None:
        """Nothing to keep."""


class LinearFootprints(Stateless):
    """A trained probe on the node's token: `model(tokens [B, N]) → logits [B, N, L, E]`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return likeliest(self.model(trees.tokens_BN), self.model.config.num_experts_per_tok)


class DraftMLPFootprints(Stateless):
    """A small MLP on what the draft head is fed at a node: `model(tokens [B, N], hidden [B, N, H])` → the same."""

    needs_hidden = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return likeliest(self.model(trees.tokens_BN, trees.hidden_BNH), self.model.config.num_experts_per_tok)


class LastStepFootprints(Stateless):
    """Every node is expected to use the experts of the last token that went through the target.

    As they are the same for all nodes, none adds to what the root needs: selection falls back on EAGLE's rule.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor]) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return same_for_all(torch.stack([new_nLK[-1] for new_nLK in routed]), trees.width, self.num_experts)


class TableFootprints(Stateless):
    """Footprints from a table (`frequency` or `token`): they depend on the node's token alone."""

    def __init__(self, table: FrequencyPredictor | TokenPredictor, num_experts: int) -> None:
        self.table = table
        self.num_experts = num_experts

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        tokens_BN = trees.tokens_BN
        experts_XLK = torch.as_tensor(self.table.predict(tokens_BN.flatten().cpu().numpy())).long()
        experts_BNLK = experts_XLK.unflatten(0, tokens_BN.shape).to(tokens_BN.device)
        return as_footprints(experts_BNLK, self.num_experts)


def likeliest(logits_BNLE: Tensor, top_k: int) -> Tensor:
    """bool [B, N, L, E]: the K experts of each node and layer with the largest logits."""
    return as_footprints(top_experts(logits_BNLE, top_k), logits_BNLE.shape[-1])


def same_for_all(experts_BLK: Tensor, nodes: int, num_experts: int) -> Tensor:
    """bool [B, N, L, E]: of each text the same experts at all of its nodes; an id of -1 stands for none."""
    experts_BLK = experts_BLK.where(experts_BLK >= 0, num_experts)
    return as_footprints(experts_BLK, num_experts + 1)[:, None, ..., :-1].expand(-1, nodes, -1, -1)


def as_footprints(experts_XLK: Tensor, num_experts: int) -> Tensor:
    """bool [..., L, E] from expert ids [..., L, K]."""
    shape = (*experts_XLK.shape[:-1], num_experts)
    return torch.zeros(shape, dtype=torch.bool, device=experts_XLK.device).scatter_(-1, experts_XLK, True)
