"""Draft trees grown without caches, masks or batches: the text and every path are read afresh.

Slow and plain, it is what `TreeDrafter` must equal over any number of rounds.

Letters: T tokens of a text, n entries of the text in the head, F width of the features, H hidden width, D draft ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.drafters.base import DraftHead


@dataclass(frozen=True)
class Node:
    token: int
    parent: int
    prob: float
    depth: int
    path: tuple[int, ...]  # tokens from the first level down to it


def output_after(head: DraftHead, ids_T: Tensor, features_nF: Tensor | None, path: tuple[int, ...]) -> Tensor:
    """The head's output [1, 1, H] at the end of the text and a path below its last token, one draft at a time."""
    cache, ids_n = head.new_cache(), ids_T[head.first_token :]
    n = len(ids_n)
    hidden = None if features_nF is None else head.enter(features_nF[None])
    out = head.forward(ids_n[None], hidden, torch.arange(n)[None], None, cache)[:, -1:]
    for place, token in enumerate(path):
        seen = torch.ones(1, 1, n + place + 1, dtype=torch.bool)
        position = torch.tensor([[n + place]])
        out = head.forward(torch.tensor([[token]]), head.feedback(out), position, seen, cache)
    return out


def children_of(head: DraftHead, ids_T: Tensor, features_nF: Tensor | None, node: Node, number: int, topk: int) -> list:
    out = output_after(head, ids_T, features_nF, node.path)
    conditional, draft_ids = head.logits(out[0, 0]).softmax(-1).topk(topk)
    tokens = head.target_ids(draft_ids).tolist()
    return [
        Node(token, number, node.prob * p, node.depth + 1, (*node.path, token))
        for token, p in zip(tokens, conditional.tolist(), strict=True)
    ]


@torch.no_grad()
def hidden_by_hand(head: DraftHead, ids_T: Tensor, features_nF: Tensor, path: tuple[int, ...]) -> Tensor:
    """[H]: what the head is fed at the node that `path` leads to: the target's features, or its parent's output."""
    if not path:
        return head.enter(features_nF[None])[0, -1]
    return head.feedback(output_after(head, ids_T, features_nF, path[:-1]))[0, 0]


@torch.no_grad()
def tree_by_hand(head: DraftHead, ids_T: Tensor, features_nF: Tensor | None, steps: int, topk: int) -> list[Node]:
    """All nodes, root first: each level has the children of the `topk` most probable nodes of the level above."""
    nodes = [Node(int(ids_T[-1]), -1, 1.0, 0, ())]
    frontier = [0]
    for _ in range(steps):
        first = len(nodes)
        for number in frontier:
            nodes += children_of(head, ids_T, features_nF, nodes[number], number, topk)
        frontier = sorted(range(first, len(nodes)), key=lambda number: -nodes[number].prob)[:topk]
    return nodes
