"""The trained predictor as a footprint source, with a cache of its own.

Letters: B texts, T tokens of a text (root last), N tree nodes (root first), n new tokens of a text, L MoE layers,
E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.masks import additive, seen_past
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.kinds.routing import likeliest, step_tokens


class PredictorFootprints:
    """The trained predictor with its own cache: one forward a step over the new tokens and the whole trees."""

    def __init__(self, predictor: ExpertPredictor) -> None:
        self.predictor = predictor
        self.cache = RowCache()

    def reset(self, rows: int) -> None:
        """See `FootprintSource`."""
        self.cache = RowCache(lengths=[0] * rows)

    def keep_rows(self, rows: list[int]) -> None:
        """See `FootprintSource`."""
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


def predictor_step(predictor: ExpertPredictor, context: int, nodes: int) -> Callable[[], object]:
    """What predicts `nodes` new tokens after a cached context, to be timed."""
    ids = step_tokens(predictor, context + nodes)
    cache = DynamicCache(config=predictor.config.backbone)
    predictor(ids[:, :context], cache=cache)

    def step() -> None:
        predictor(ids[:, context:], cache=cache).cpu()
        cache.crop(-nodes)

    return step
