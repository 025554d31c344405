"""How the target chooses tokens, exactly as Transformers' own sampling loop does, and the walk down a verified tree.

The walk follows the child that equals the target's own choice. Its shapes do not depend on what is chosen: on a GPU it
runs to the tree's depth and is read once, draws past the accepted path being taken back. Where reading costs nothing
(CPU), and where a processor or criterion is not Transformers' own and might keep state, it stops with the path. What
might keep state is shown no more of a text than plain decoding shows it.

Letters: B texts, N nodes of a pass (root first), V vocabulary, T tokens of a text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.tree import DraftTrees


class Picker:
    """Chooses the next token of one text, with Transformers' processors, criteria and the text's own generator."""

    def __init__(
        self, logits_processor, stopping_criteria, do_sample: bool, generator: torch.Generator | None = None
    ) -> None:
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.do_sample = do_sample
        self.generator = generator
        self.keeps_state = any(
            not type(part).__module__.startswith("transformers.") for part in (*logits_processor, *stopping_criteria)
        )

    def pick(self, ids_1T: Tensor, logits_1V: Tensor) -> Tensor:
        """The next token [1] of the text `ids_1T`, given the target's logits after it."""
        scores = self.logits_processor(ids_1T, logits_1V.to(torch.float32, copy=True))
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]

    def ended(self, ids_1T: Tensor) -> Tensor:
        """bool [1]: does the text end here?"""
        return self.stopping_criteria(ids_1T, None)

    def draws_so_far(self, device: torch.device) -> Tensor | None:
        """The state of the generator, None for greedy decoding."""
        return self._generator(device).get_state() if self.do_sample else None

    def take_back(self, device: torch.device, state: Tensor | None) -> None:
        """Return to an earlier state: what was drawn since must not show in later draws."""
        if state is not None:
            self._generator(device).set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if device.type == "cuda":
            return torch.cuda.default_generators[device.index or 0]
        return torch.default_generator


@dataclass
class Row:
    """One text being decoded: `padding` ids before it, which only its processors see, and how its tokens are picked."""

    ids_T: Tensor
    picker: Picker
    padding: int = 0

    @property
    def text_T(self) -> Tensor:
        return self.ids_T[self.padding :]


@dataclass(frozen=True)
class Walk:
    """One text's way down its tree.

    `emitted`: tokens, cut where the text ends; `kept`: nodes of the accepted path, root first; `would_emit`: tokens had
    the text not ended (unless something keeps state); `verified`: real nodes of its tree.
    """

    emitted: list[int]
    kept: list[int]
    would_emit: int
    ended: bool
    verified: int


def is_cpu(device: torch.device) -> bool:
    """Whether a value can be read without waiting: a GPU's is waited for."""
    return device.type == "cpu"


def walk(trees: DraftTrees, logits_BNV: Tensor, rows: list[Row]) -> list[Walk]:
    """Follow the target's own choices down the trees; the rows' texts grow by what was emitted."""
    device, index_B = logits_BNV.device, torch.arange(len(rows), device=logits_BNV.device)
    reads_each = is_cpu(device) or any(row.picker.keeps_state for row in rows)
    node_B, alive_B = torch.zeros_like(index_B), torch.ones_like(index_B, dtype=torch.bool)
    texts = [row.ids_T[None] for row in rows]
    stops_B = torch.tensor([row.picker.keeps_state for row in rows], device=device)
    alive, levels, states = [True] * len(rows), [], []
    for _ in range(trees.depth_limit + 1):
        logits_BV = logits_BNV[index_B, node_B]
        token_B, ended_B, state = _pick_all(rows, texts, logits_BV, alive)
        levels.append(torch.stack([token_B, node_B, alive_B.long(), ended_B.long()]))
        states.append(state)
        child_BN = (trees.parents_BN == node_B[:, None]) & (trees.tokens_BN == token_B[:, None]) & trees.real_BN
        node_B, alive_B = child_BN.int().argmax(1), alive_B & child_BN.any(1) & ~(stops_B & ended_B)
        if reads_each:
            alive = alive_B.tolist()
            if not any(alive):
                break
    *levels, real = torch.stack([*levels, trees.real_BN.sum(1).expand(4, -1)]).tolist()  # the step's one read
    return [_finish(row, b, levels, texts[b], [s[b] for s in states], real[0][b]) for b, row in enumerate(rows)]


def _pick_all(
    rows: list[Row], texts: list[Tensor], logits_BV: Tensor, alive: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Each living text's next token (appended to `texts`), whether it ends there, and its generator's state after."""
    tokens, ended, states = [], [], []
    for b, row in enumerate(rows):
        if alive[b]:
            tokens.append(row.picker.pick(texts[b], logits_BV[b : b + 1]))
            texts[b] = torch.cat([texts[b], tokens[-1][:, None]], dim=1)
            ended.append(row.picker.ended(texts[b]))
        else:
            tokens.append(torch.zeros_like(texts[b][:, 0]))
            ended.append(torch.zeros_like(tokens[-1], dtype=torch.bool))
        states.append(row.picker.draws_so_far(logits_BV.device))
    return torch.cat(tokens), torch.cat(ended), states


def _finish(row: Row, b: int, levels: list, ids_1T: Tensor, states: list[Tensor | None], verified: int) -> Walk:
    """What one text makes of the levels (token, node, alive, ended by text); sets the row's text and generator."""
    path = [[part[b] for part in level] for level in levels if level[2][b]]
    ends = [place for place, (_, _, _, ended) in enumerate(path, 1) if ended]
    emitted = path[: ends[0]] if ends else path
    row.picker.take_back(ids_1T.device, states[len(emitted) - 1])
    row.ids_T = ids_1T[0, : len(row.ids_T) + len(emitted)]
    return Walk([token for token, *_ in emitted], [node for _, node, *_ in path], len(path), bool(ends), verified)
