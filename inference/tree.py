"""Draft trees: candidate continuations of the last emitted token, as small flat tensors.

Letters: N nodes, the root (node 0: the last emitted token, not yet in the target's cache) included.
Knows nothing about models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Nodes in an order in which parents precede their children.

    `tokens_N` int64 ids of the target; `parents_N` int64, -1 for the root; `prob_N` float32, product of draft
    probabilities from the root (root: 1); `depth_N` int64 (root: 0).
    """

    tokens_N: Tensor
    parents_N: Tensor
    prob_N: Tensor
    depth_N: Tensor

    @property
    def parents(self) -> Tensor:
        return self.parents_N

    @property
    def prob(self) -> Tensor:
        return self.prob_N

    def __len__(self) -> int:
        return len(self.tokens_N)

    def subtree(self, chosen: Tensor) -> "DraftTree":
        """The nodes `chosen` (ascending, parents included), renumbered from 0."""
        new_index_N = torch.full_like(self.parents_N, -1)
        new_index_N[chosen] = torch.arange(len(chosen), device=chosen.device)
        parents = self.parents_N[chosen]
        renumbered = torch.where(parents >= 0, new_index_N[parents.clamp(min=0)], -1)
        return DraftTree(self.tokens_N[chosen], renumbered, self.prob_N[chosen], self.depth_N[chosen])


def root_only(token: Tensor) -> DraftTree:
    """The tree of plain decoding: the root alone. `token` is a 0-d tensor."""
    one = token.reshape(1)
    return DraftTree(one, torch.full_like(one, -1), torch.ones_like(one, dtype=torch.float32), torch.zeros_like(one))


def tree_from_levels(root: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]]) -> DraftTree:
    """A tree from its levels, each (tokens, parents as node numbers, conditional draft probabilities)."""
    tree = root_only(root)
    tokens, parents, prob, depth = [tree.tokens_N], [tree.parents_N], [tree.prob_N], [tree.depth_N]
    for number, (level_tokens, level_parents, conditional) in enumerate(levels, 1):
        tokens.append(level_tokens)
        parents.append(level_parents)
        prob.append(torch.cat(prob)[level_parents] * conditional.float())
        depth.append(torch.full_like(level_tokens, number))
    return DraftTree(torch.cat(tokens), torch.cat(parents), torch.cat(prob), torch.cat(depth))


def depths_of(parents_N: Tensor) -> Tensor:
    """Depth of every node (root 0), int64 [N], in N - 1 pointer jumps of fixed shape."""
    depth_N = torch.zeros_like(parents_N)
    at_N = parents_N
    for _ in range(len(parents_N) - 1):
        depth_N = depth_N + (at_N >= 0)
        at_N = torch.where(at_N >= 0, parents_N[at_N.clamp(min=0)], at_N)
    return depth_N


def ancestors_of(parents_N: Tensor) -> Tensor:
    """bool [N, N]: entry (i, j) says that j is i or an ancestor of i."""
    N = len(parents_N)
    eye_NN = torch.eye(N, dtype=torch.bool, device=parents_N.device)
    seen_NN = eye_NN.clone()
    parent_of = parents_N.clamp(min=0)  # the root's own row absorbs
    for _ in range(N - 1):
        seen_NN = eye_NN | seen_NN[parent_of]
    return seen_NN
