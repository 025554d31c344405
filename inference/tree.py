"""Draft trees: candidate continuations of the last emitted token, as small flat tensors.

Letters: N nodes, the root (node 0: the last emitted token, not yet in the target's cache) included; B texts; M nodes of
one level; H hidden width of a draft head. `...` stands for any leading dimensions. Knows nothing about models.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """One text's tree, in an order in which parents precede their children.

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


@dataclass(frozen=True)
class DraftTrees:
    """The trees of B texts, padded to one width with copies of their roots that `real_BN` leaves out.

    A copy of the root is computed like the root, so padding makes no expert active that the root does not.
    `hidden_BNH`: what the draft head is fed beside each node's token, where the drafter was asked for it.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    prob_BN: Tensor
    depth_BN: Tensor
    real_BN: Tensor
    depth_limit: int  # no node is deeper
    hidden_BNH: Tensor | None = None
    _ancestors_BNN: Tensor | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.tokens_BN)

    @property
    def width(self) -> int:
        return self.tokens_BN.shape[1]

    @property
    def ancestors_BNN(self) -> Tensor:
        """bool [B, N, N]: entry (i, j) says that j is i or an ancestor of i. Computed once."""
        if self._ancestors_BNN is None:  # no cached_property: its lock keeps a function from being compiled whole
            object.__setattr__(self, "_ancestors_BNN", ancestors_of(self.parents_BN))
        return self._ancestors_BNN

    def row(self, number: int) -> DraftTree:
        """One text's tree without its padding."""
        real_N = self.real_BN[number]
        fields = (self.tokens_BN, self.parents_BN, self.prob_BN, self.depth_BN)
        return DraftTree(*(field[number][real_N] for field in fields))

    def pack(self, chosen_BN: Tensor, width: int | None = None) -> "DraftTrees":
        """The chosen nodes alone (bool, prefix-closed), renumbered in their order and padded to `width`.

        `width`: the most nodes that any text has; where it is not known beforehand it is read from the device.
        """
        N = self.width
        width = int(chosen_BN.sum(1).max()) if width is None else width
        index_N = torch.arange(N, device=chosen_BN.device)
        packed_BG = torch.where(chosen_BN, index_N, N).sort(1).values[:, :width]
        real_BG = packed_BG < N
        at_BG = packed_BG.where(real_BG, 0)
        parents_BG = self.parents_BN.gather(1, at_BG)
        number_BN = chosen_BN.cumsum(1) - 1
        parents_BG = number_BN.gather(1, parents_BG.clamp(min=0)).where(parents_BG >= 0, -1)
        return DraftTrees(
            self.tokens_BN.gather(1, at_BG),
            parents_BG,
            self.prob_BN.gather(1, at_BG),
            self.depth_BN.gather(1, at_BG),
            real_BG,
            min(self.depth_limit, width - 1),
        )


def stack(trees: list[DraftTree]) -> DraftTrees:
    """Trees of several texts as one batch; depths are those that the parents give."""
    width = max(len(tree) for tree in trees)

    def padded(rows: list[Tensor], value: float | None = None) -> Tensor:
        """Rows filled up with `value`, or with their own first entry."""
        filling = [(row[0] if value is None else row.new_tensor(value)).expand(width - len(row)) for row in rows]
        return torch.stack([torch.cat(pair) for pair in zip(rows, filling, strict=True)])

    parents_BN = padded([tree.parents_N for tree in trees])
    depth_BN = depths_of(parents_BN)
    return DraftTrees(
        padded([tree.tokens_N for tree in trees]),
        parents_BN,
        padded([tree.prob_N.float() for tree in trees], 0.0),
        depth_BN,
        padded([torch.ones_like(tree.tokens_N, dtype=torch.bool) for tree in trees], False),
        int(depth_BN.max()),
    )


def roots_only(tokens_B: Tensor) -> DraftTrees:
    """The trees of plain decoding: the roots alone."""
    tokens_B1 = tokens_B[:, None]
    zeros = torch.zeros_like(tokens_B1)
    return DraftTrees(tokens_B1, zeros - 1, torch.ones_like(tokens_B1, dtype=torch.float32), zeros, zeros == 0, 0)


def root_only(token: Tensor) -> DraftTree:
    """One text's tree of plain decoding. `token` is a 0-d tensor."""
    return roots_only(token.reshape(1)).row(0)


def trees_from_levels(tokens_B: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]]) -> DraftTrees:
    """Trees from roots and levels, each [B, M]: tokens, parents as node numbers, conditional draft probabilities."""
    root = roots_only(tokens_B)
    tokens, parents, prob, depth = [root.tokens_BN], [root.parents_BN], [root.prob_BN], [root.depth_BN]
    for number, (level_tokens, level_parents, conditional) in enumerate(levels, 1):
        tokens.append(level_tokens)
        parents.append(level_parents)
        prob.append(torch.cat(prob, 1).gather(1, level_parents) * conditional.float())
        depth.append(torch.full_like(level_tokens, number))
    tokens_BN = torch.cat(tokens, 1)
    real_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    return DraftTrees(tokens_BN, torch.cat(parents, 1), torch.cat(prob, 1), torch.cat(depth, 1), real_BN, len(levels))


def tree_from_levels(root: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]]) -> DraftTree:
    """One text's tree from its root (0-d) and its levels, each [M]."""
    return trees_from_levels(root.reshape(1), [tuple(part[None] for part in level) for level in levels]).row(0)


def ancestors_of(parents: Tensor) -> Tensor:
    """bool [..., N, N] from parents [..., N]: entry (i, j) says that j is i or an ancestor of i."""
    N = parents.shape[-1]
    index_N = torch.arange(N, device=parents.device)
    seen = (parents[..., None] == index_N) | (index_N[:, None] == index_N)
    reach = 1
    while reach < N - 1:  # paths double in length with every product
        seen = (seen.float() @ seen.float()) > 0
        reach *= 2
    return seen


def depths_of(parents: Tensor) -> Tensor:
    """Depth of every node (root 0), int64 [..., N]."""
    return ancestors_of(parents).sum(-1) - 1
