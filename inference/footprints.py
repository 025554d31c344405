"""Where the expert footprint of a draft node comes from: the predictor, or a table that costs nothing.

A source turns the text so far and a draft tree into footprints bool [N, L, E]: which experts each node is expected to
use in each MoE layer.

Letters: T tokens of the text (root last), N tree nodes (root first), L MoE layers, E experts, K experts per token.
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ecospec.inference.tree import DraftTree, ancestors_of
from ecospec.predictor.metrics import top_experts
from ecospec.predictor.model import ExpertPredictor
from ecospec.predictor.simple import FrequencyPredictor, TokenPredictor


class FootprintSource(Protocol):
    """`reset` before each text; `footprints(ids_T, tree)` once a step, with a text that only grows."""

    def reset(self) -> None: ...

    def footprints(self, ids_T: Tensor, tree: DraftTree) -> Tensor: ...


class PredictorFootprints:
    """The trained predictor with its own cache: one forward a step over the new tokens and the whole tree."""

    def __init__(self, predictor: ExpertPredictor) -> None:
        self.predictor = predictor
        self.cache = DynamicCache()

    def reset(self) -> None:
        self.cache = DynamicCache()

    @torch.inference_mode()
    def footprints(self, ids_T: Tensor, tree: DraftTree) -> Tensor:
        """bool [N, L, E]: the K likeliest experts of each node and layer (paper equation 4)."""
        cached, drafts = self.cache.get_seq_length(), len(tree) - 1
        new = len(ids_T) - cached  # tokens of the text, the root among them
        ids = torch.cat([ids_T[cached:], tree.tokens_N[1:]])
        positions = torch.cat([torch.arange(cached, len(ids_T), device=ids.device), len(ids_T) - 1 + tree.depth_N[1:]])
        logits_NLE = self.predictor(
            ids[None],
            cache=self.cache,
            attention_mask=self._mask(cached, new, tree),
            position_ids=positions[None],
        )[0, -len(tree) :]
        if drafts:
            self.cache.crop(-drafts)
        return as_footprints(top_experts(logits_NLE, self.predictor.config.num_experts_per_tok), logits_NLE.shape[-1])

    def _mask(self, cached: int, new: int, tree: DraftTree) -> Tensor:
        """Additive [1, 1, new + N - 1, all]: text causally, then each draft node its ancestors."""
        N, dtype = len(tree), self.predictor.dtype
        seen = torch.ones(new + N - 1, cached + new + N - 1, dtype=torch.bool, device=tree.tokens_N.device)
        seen[:new] = seen[:new].tril(cached)
        seen[new:, cached + new - 1 :] = ancestors_of(tree.parents_N)[1:]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


class TableFootprints:
    """Footprints from a table (`frequency` or `token`): they depend on the node's token alone."""

    def __init__(self, table: FrequencyPredictor | TokenPredictor, num_experts: int) -> None:
        self.table = table
        self.num_experts = num_experts

    def reset(self) -> None:
        """Nothing to forget."""

    def footprints(self, ids_T: Tensor, tree: DraftTree) -> Tensor:
        experts_NLK = torch.as_tensor(self.table.predict(tree.tokens_N.cpu().numpy())).long()
        return as_footprints(experts_NLK.to(ids_T.device), self.num_experts)


def as_footprints(experts_NLK: Tensor, num_experts: int) -> Tensor:
    """bool [N, L, E] from expert ids [N, L, K]."""
    shape = (*experts_NLK.shape[:-1], num_experts)
    return torch.zeros(shape, dtype=torch.bool, device=experts_NLK.device).scatter_(-1, experts_NLK, True)
