"""EAGLE-3's training-time test: the steps of a chain draft from every position of a text at once, and their losses.

A rollout begins at a start i with the pair (target features of token i, embedding of token i + 1). Step s (from 1)
takes the embedding of token i + s, the text's own, and predicts token i + s + 1; from step 2 on its other input is the
pre-norm output of the step before. A start sees what it sees while decoding: the keys made from target features up to
itself, then its own steps' keys. All tensors are indexed by the start, so no step needs a shift.

Knows nothing about targets, files or optimizers.

Letters: B batch, T tokens of the longest text, S starts of a step (T - s), H draft hidden width, F feature width,
D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ecospec.inference.drafters.eagle3.head import Eagle3Attention, Eagle3Head

STEP_DECAY = 0.8  # weight of a step's loss relative to the step before, as EAGLE-3 trains


class DraftBatch(NamedTuple):
    """Texts padded at the end, where no start sees the padding, and what the target made of them.

    `ids_BT` int64; `features_BTF`; `final_BTH` the target's last hidden states, after its final norm; `best_BT` int64,
    its most probable next token; `lengths_B` and `prompt_lens_B` int64.
    """

    ids_BT: Tensor
    features_BTF: Tensor
    final_BTH: Tensor
    best_BT: Tensor
    lengths_B: Tensor
    prompt_lens_B: Tensor

    def starts(self, step: int) -> Tensor:
        """bool [B, S]: the starts whose texts are long enough for this step (from 1)."""
        return torch.arange(step, self.ids_BT.shape[1]) < self.lengths_B[:, None]


def rollout(head: Eagle3Head, ids_BT: Tensor, features_BTF: Tensor, steps: int) -> list[Tensor]:
    """Pre-norm outputs [B, T - s, H] of each step s; entry [b, i] of step s predicts token i + s + 1 of text b."""
    layer = head.midlayer
    hidden = head.enter(features_BTF)
    outputs, keys_values = [], []
    for step in range(1, steps + 1):
        hidden = hidden[:, : ids_BT.shape[1] - step]
        inputs = layer.inputs(head.embed(ids_BT[:, step:]), hidden)
        query, key, value = layer.self_attn.project(inputs, head.positions(hidden, step - 1))
        keys_values.append((key, value))
        hidden = layer.finish(hidden, attend(layer.self_attn, query, keys_values))
        outputs.append(hidden)
    return outputs


def attend(attention: Eagle3Attention, query: Tensor, keys_values: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention output [B, S, H] of one step: causal over the first step's keys, then the start's own later keys.

    `query` [B, heads, S, head_dim]; `keys_values`: keys and values of steps 1, 2, …, each for S starts or more.
    """
    S = query.shape[2]
    (key, value), *own = [(k[:, :, :S], v[:, :, :S]) for k, v in keys_values]
    if not own:
        return attention.attend(query, key, value, None)
    query = query.unflatten(1, (key.shape[1], -1)) * attention.head_dim**-0.5  # [B, kv heads, group, S, head_dim]
    future_SS = torch.ones(S, S, dtype=torch.bool, device=query.device).triu(1)
    stable = (query @ key[:, :, None].transpose(-1, -2)).masked_fill(future_SS, -torch.inf)
    chain = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat([stable, *chain], dim=-1).softmax(-1)
    out = weights[..., :S] @ value[:, :, None]
    for place, (_, v) in enumerate(own, S):
        out = out + weights[..., place, None] * v[:, :, None]
    return attention.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


def rollout_losses(head: Eagle3Head, batch: DraftBatch, target_weight_DH: Tensor, steps: int) -> list[Tensor]:
    """Mean cross-entropy of each step, in nats, against the target's softmax over the draft vocabulary.

    As in EAGLE-3 the target's probabilities are renormalised over the draft vocabulary, and starts whose most probable
    token lies outside it do not count. `target_weight_DH`: those rows of the target's output matrix.
    """
    with torch.no_grad():
        target_BTD = (batch.final_BTH @ target_weight_DH.T).float().softmax(-1)
        known_BT = head.t2d[batch.best_BT]
    outputs = rollout(head, batch.ids_BT, batch.features_BTF, steps)
    losses = []
    for step, hidden_BSH in enumerate(outputs, 1):
        counted_BS = batch.starts(step) & known_BT[:, step:]
        entropy_BS = -(target_BTD[:, step:] * head.logits(hidden_BSH).log_softmax(-1)).sum(-1)
        losses.append((entropy_BS * counted_BS).sum() / counted_BS.sum().clamp(min=1))
    return losses


def weighted_loss(losses: list[Tensor]) -> Tensor:
    """The steps' losses summed with weights 1, 0.8, 0.64, …"""
    return sum(loss * STEP_DECAY**index for index, loss in enumerate(losses))


class DraftScores(NamedTuple):
    """Sums over decode rounds whose root is a token of an answer, int64 [steps] each.

    `agreed`: drafted tokens that are the target's most probable ones, of `rounds`; `accepted`: rounds of which the
    text itself follows the greedy chain draft at least so far, of `full_rounds` (those with text enough for all steps).
    """

    agreed: Tensor
    rounds: Tensor
    accepted: Tensor
    full_rounds: Tensor

    def __add__(self, other: "DraftScores") -> "DraftScores":
        return DraftScores(*(a + b for a, b in zip(self, other, strict=True)))


@torch.inference_mode()
def score(head: Eagle3Head, batch: DraftBatch, steps: int) -> DraftScores:
    """How well the head's most probable tokens match the target, step by step, the text's own tokens being given."""
    T = batch.ids_BT.shape[1]
    answer_BT = torch.arange(1, T + 1) >= batch.prompt_lens_B[:, None]  # by start: is its root in the answer?
    full_BS = batch.starts(steps + 1) & answer_BT[:, : T - steps - 1]
    alive_BS, sums = full_BS, []
    for step, hidden_BSH in enumerate(rollout(head, batch.ids_BT, batch.features_BTF, steps), 1):
        tokens_BS = head.target_ids(head.logits(hidden_BSH).argmax(-1))
        rounds_BS = batch.starts(step) & answer_BT[:, : T - step]
        following_BS = batch.ids_BT[:, step + 1 :][:, : T - steps - 1]
        alive_BS = alive_BS & (tokens_BS[:, : T - steps - 1] == following_BS)
        agreed_BS = rounds_BS & (tokens_BS == batch.best_BT[:, step:])
        sums.append([flags.sum() for flags in (agreed_BS, rounds_BS, alive_BS, full_BS)])
    return DraftScores(*torch.tensor(sums).T)
