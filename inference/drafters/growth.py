"""Grow draft trees with a neural draft head: extend over the text, then `steps` levels of the `topk` best nodes.

Entries made from the text (and from the target's features) stay in the head's cache; those of a tree's own nodes are
dropped when the tree is done. The first forward of a step reads what is new of the text and gives the first level, so
`steps` levels cost `steps` forwards. A level's candidates are the children of its `topk` most probable nodes; drafts
are deterministic, whatever the sampling temperature.

Letters: B texts, T tokens of a text, n new entries, k nodes kept per level, H hidden width of the head, S cached slots.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ecospec.inference.drafters.base import BatchDrafter, DraftHead
from ecospec.inference.drafters.kind import no_hidden
from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.masks import seen_past
from ecospec.inference.tree import DraftTrees, trees_from_levels


class TreeDrafter(BatchDrafter):
    """Drafts with `head`: `steps` levels, `topk` children per node, the `topk` best nodes of a level going on."""

    def __init__(self, head: DraftHead, steps: int = 3, topk: int = 2) -> None:
        self.head = head
        self.feature_layers = head.feature_layers
        self.steps = steps
        self.topk = topk
        self._gives_hidden = False
        self.reset(1)

    def reset(self, rows: int) -> None:
        """See `BatchDrafter`."""
        self.cache = RowCache(self.head.new_cache(), [0] * rows)

    def keep_rows(self, rows: list[int]) -> None:
        """See `BatchDrafter`."""
        self.cache.keep_rows(rows)

    def give_hidden(self) -> None:
        """See `BatchDrafter`."""
        if not self.feature_layers:
            raise no_hidden()
        self._gives_hidden = True

    @torch.inference_mode()
    def draft(self, texts: list[Tensor], features: list[Tensor] | None) -> DraftTrees:
        """See `BatchDrafter`."""
        root_B1H, out_B1H = self._extend(texts, features)
        levels, fed = self._grow(out_B1H)
        self.cache.keep_first([0] * len(texts), self.topk * (self.steps - 1))
        trees = trees_from_levels(torch.stack([ids_T[-1] for ids_T in texts]), levels)
        if not self._gives_hidden:
            return trees
        H = root_B1H.shape[-1]  # what drafts are fed may be wider: of several MTP layers, their own level's is first
        children = torch.cat([hidden[..., :H] for hidden in fed], dim=1).repeat_interleave(self.topk, dim=1)
        return replace(trees, hidden_BNH=torch.cat([root_B1H, children], dim=1))

    def _extend(self, texts: list[Tensor], features: list[Tensor] | None) -> tuple[Tensor | None, Tensor]:
        """Read what is new of the texts; the head's hidden input and output at each text's last token, [B, 1, H]."""
        new = [ids_T[self.head.first_token + length :] for ids_T, length in zip(texts, self.cache.lengths, strict=True)]
        counts = [len(ids) for ids in new]
        hidden = self.head.enter(pad_sequence(features, batch_first=True)) if features else None
        ids_Bn = pad_sequence(new, batch_first=True)
        device = ids_Bn.device
        n, lengths_B = ids_Bn.shape[1], self.cache.lengths_B(device)
        steps_n = torch.arange(n, device=device)
        positions_Bn = lengths_B[:, None] + steps_n
        seen = None
        if self.cache.width:
            past = seen_past(lengths_B, self.cache.width, positions_Bn)
            own = (steps_n <= steps_n[:, None]).expand(len(texts), -1, -1)
            seen = torch.cat([past, own], dim=-1)
        out = self.head.forward(ids_Bn, hidden, positions_Bn, seen, self.cache.cache)
        self.cache.keep_first(counts, n)
        last_B1 = lengths_B.new_tensor(counts)[:, None] - 1
        return _rows(hidden, last_B1) if self._gives_hidden else None, _rows(out, last_B1)

    def _grow(self, out_B1H: Tensor) -> tuple[list[tuple[Tensor, Tensor, Tensor]], list[Tensor | None]]:
        """Levels of (target ids, parents, conditional probabilities), each [B, nodes], best first within a parent.

        Beside them what the children of the nodes that went on are fed, [B, nodes, H]: `topk` children each, in order.
        """
        k, device, B = self.topk, out_B1H.device, len(out_B1H)
        conditional_Bk, draft_ids = self.head.logits(out_B1H[:, 0]).softmax(-1).topk(k)
        tokens = self.head.target_ids(draft_ids)
        levels = [(tokens, torch.zeros_like(tokens), conditional_Bk)]
        fed = [self.head.feedback(out_B1H)]
        hidden = _rows(fed[-1], torch.zeros(B, k, dtype=torch.long, device=device))
        level_start, frontier_Bk, prob_Bk = 1, torch.arange(k, device=device).expand(B, -1), conditional_Bk
        lengths_B = self.cache.lengths_B(device)
        past_BkS = seen_past(lengths_B, self.cache.width, frontier_Bk)
        seen_Bk = torch.zeros(B, k, 0, dtype=torch.bool, device=device)  # tree entries that a frontier node sees
        eye_kk = torch.eye(k, dtype=torch.bool, device=device).expand(B, -1, -1)
        for depth in range(1, self.steps):
            seen_Bk = torch.cat([seen_Bk, eye_kk], dim=-1)
            positions_Bk = (lengths_B + depth - 1)[:, None].expand(-1, k)
            seen = torch.cat([past_BkS, seen_Bk], dim=-1)
            ids_Bk = tokens.gather(1, frontier_Bk)
            out_BkH = self.head.forward(ids_Bk, hidden, positions_Bk, seen, self.cache.cache)
            conditional_Bkk, draft_ids = self.head.logits(out_BkH).softmax(-1).topk(k)
            parents = (level_start + frontier_Bk).repeat_interleave(k, dim=1)
            level_start += tokens.shape[1]
            tokens = self.head.target_ids(draft_ids.flatten(1))
            levels.append((tokens, parents, conditional_Bkk.flatten(1)))
            prob_Bk, frontier_Bk = (prob_Bk[..., None] * conditional_Bkk).flatten(1).topk(k)
            fed.append(self.head.feedback(out_BkH))
            hidden = _rows(fed[-1], frontier_Bk // k)
            seen_Bk = _rows(seen_Bk, frontier_Bk // k)
        return levels, fed


def _rows(values_BMX: Tensor | None, index_Bk: Tensor) -> Tensor | None:
    """Of each text the rows `index_Bk` of its values."""
    if values_BMX is None:
        return None
    return values_BMX.gather(1, index_Bk[..., None].expand(-1, -1, values_BMX.shape[-1]))
