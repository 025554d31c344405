"""Drafters and footprint sources of a few lines and random models behind them, for tests of the decoding loop.

Letters: L MoE layers, E experts, K experts per token, H hidden width of a draft head.
"""

from types import SimpleNamespace

import torch
from torch import nn
from transformers import Qwen3Config

from ecospec.inference.footprints import as_footprints
from ecospec.inference.tree import root_only, tree_from_levels
from ecospec.predictor.kinds.predictor.model import ExpertPredictor, ExpertPredictorConfig
from ecospec.predictor.kinds.routing import embedding_hash
from tests.tiny import VOCABULARY

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class NoisyOracle:
    """Drafts the true continuation with probability `skill` per level, beside a wrong token; 3 levels, top-2."""

    feature_layers = (2,)

    def __init__(self, truth: list[int], skill: float, seed: int = 0) -> None:
        self.truth, self.skill, self.seed = truth, skill, seed

    def reset(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.seen = 0

    def draft(self, ids_T, features_nF):
        self.seen += len(features_nF)
        assert self.seen == len(ids_T) - 1, "features of every token before the root, once each"
        levels, parent = [], 0
        for depth in range(3):
            at = len(ids_T) + depth
            good = self.truth[at] if at < len(self.truth) else 5
            if torch.rand((), generator=self.generator) > self.skill:
                good = (good + 1) % VOCABULARY
            bad = (good + 7) % VOCABULARY
            pair = [good, bad] if torch.rand((), generator=self.generator) < 0.5 else [bad, good]
            parents = torch.tensor([parent, parent])
            levels.append((torch.tensor(pair), parents, torch.tensor([0.6, 0.3])))
            parent = 1 + 2 * depth + pair.index(good)
        return tree_from_levels(ids_T[-1], levels)


class EmptyDrafter:
    feature_layers = ()

    def reset(self) -> None: ...

    def draft(self, ids_T, features_nF):
        return root_only(ids_T[-1])


class HashedFootprints:
    """Experts that depend on the token id alone."""

    def reset(self, rows) -> None: ...

    def keep_rows(self, rows) -> None: ...

    def footprints(self, texts, trees, routed):
        first = torch.stack([trees.tokens_BN % 8, (trees.tokens_BN // 8 + 1) % 8], dim=-1)
        return as_footprints(first[..., None, :].expand(-1, -1, 3, -1).contiguous(), 8)


@torch.no_grad()
def tiny_predictor(embedding, seed=0):
    """A random predictor for a target of 3 MoE layers with 8 experts, top-2, whose embedding this is."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 1, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    backbone = Qwen3Config(**sizes, num_key_value_heads=1, intermediate_size=24)
    V, H = embedding.weight.shape
    its_target = {"vocab_size": V, "embedding_size": H, "embedding_sha256": embedding_hash(embedding.weight)}
    predictor = (
        ExpertPredictor(
            ExpertPredictorConfig(backbone, num_layers=3, num_experts=8, num_experts_per_tok=2, **its_target)
        )
        .eval()
        .requires_grad_(False)
    )
    for parameter in predictor.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.4)
    return predictor.attach_embedding(embedding)


class LinearStandIn(nn.Module):
    """A random table with the interface of a trained probe: logits from the token alone."""

    def __init__(self, shape=(3, 8, 2), seed=0):
        super().__init__()
        L, E, K = shape
        self.config = SimpleNamespace(num_layers=L, num_experts=E, num_experts_per_tok=K)
        self.generator = torch.Generator().manual_seed(seed)
        self.table = self.random(VOCABULARY)

    def random(self, rows):
        config = self.config
        return torch.randn(rows, config.num_layers, config.num_experts, generator=self.generator)

    def attach_embedding(self, embedding):
        """Nothing to attach to."""

    def forward(self, input_ids):
        return self.table[input_ids]


class DraftMLPStandIn(LinearStandIn):
    """The same plus a random map of the draft head's hidden input."""

    def __init__(self, shape=(3, 8, 2), hidden_size=32, seed=0):
        super().__init__(shape, seed)
        self.map = self.random(hidden_size)

    def require_head(self, head, steps):
        """Any head will do."""

    def forward(self, input_ids, hidden_BNH):
        return self.table[input_ids] + torch.einsum("bnh,hle->bnle", hidden_BNH, self.map)
