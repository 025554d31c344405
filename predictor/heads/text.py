"""What a draft head learns from: texts, and what the target made of each of their tokens, kept in memory.

The target runs once over every text. Kept in bfloat16 are its features and its final hidden states, from which the
logits, too large to keep, are recomputed batch by batch. Knows nothing about draft heads or training.

Letters: B batch, T tokens of the longest text, N tokens of all texts, R texts, H target hidden width, F feature width
(three layers, 3 H), V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ecospec.data.module import BatchLimits, group_by_length
from ecospec.data.traces import Trace
from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.rollout import DraftBatch
from ecospec.progress import progress


@dataclass(frozen=True, eq=False)
class TargetText:
    """Texts laid end to end: text r is the `lengths_R[r]` tokens from `firsts_R[r]` on. Ids are int64."""

    ids_N: Tensor
    features_NF: Tensor
    final_NH: Tensor
    best_N: Tensor  # the target's most probable next token
    firsts_R: Tensor
    lengths_R: Tensor
    prompt_lens_R: Tensor

    def batch(self, indices: Sequence[int]) -> DraftBatch:
        """These texts, padded at the end with their own last token."""
        chosen = torch.tensor(indices)
        lengths_B = self.lengths_R[chosen]
        within_BT = torch.arange(int(lengths_B.max())).minimum(lengths_B[:, None] - 1)
        at_BT = self.firsts_R[chosen][:, None] + within_BT
        return DraftBatch(
            self.ids_N[at_BT],
            self.features_NF[at_BT].float(),
            self.final_NH[at_BT].float(),
            self.best_N[at_BT],
            lengths_B,
            self.prompt_lens_R[chosen],
        )

    def batches(self, tokens_per_batch: int, seed: int, epoch: int = 0) -> Iterator[DraftBatch]:
        """One pass in an order that (seed, epoch) decide alone, similar lengths together."""
        for indices in group_by_length(self.lengths_R.tolist(), BatchLimits(tokens=tokens_per_batch), seed, epoch):
            yield self.batch(indices)


@torch.inference_mode()
def read_text(
    model: nn.Module, feature_layers: tuple[int, ...], items: Sequence[Trace], tokens_per_batch: int
) -> TargetText:
    """Run `model` over the items' tokens. Raises InputError for a model whose logits no head can be fitted to."""
    lengths_R = torch.tensor([len(item.input_ids) for item in items])
    ids_N = torch.from_numpy(np.concatenate([item.input_ids for item in items])).long()
    require_plain_logits(model, ids_N[: lengths_R[0]])
    N, H = len(ids_N), model.get_output_embeddings().in_features
    text = TargetText(
        ids_N=ids_N,
        features_NF=torch.empty(N, len(feature_layers) * H, dtype=torch.bfloat16),
        final_NH=torch.empty(N, H, dtype=torch.bfloat16),
        best_N=torch.empty(N, dtype=torch.long),
        firsts_R=lengths_R.cumsum(0) - lengths_R,
        lengths_R=lengths_R,
        prompt_lens_R=torch.tensor([item.prompt_len for item in items]),
    )
    groups = group_by_length(lengths_R.tolist(), BatchLimits(tokens=tokens_per_batch), seed=0, epoch=0)
    for indices in progress(groups, "batches of text through the target"):
        _fill(text, model, feature_layers, torch.tensor(indices))
    return text


def require_plain_logits(model: nn.Module, ids_T: Tensor) -> None:
    """Raises InputError unless `model`'s logits are its output matrix times its final hidden states."""
    ids_1T = ids_T[None].to(model.device)
    logits = model(ids_1T, use_cache=False).logits
    final = model.base_model(ids_1T, use_cache=False).last_hidden_state
    if not torch.allclose(logits, model.get_output_embeddings()(final), rtol=1e-2, atol=1e-2):
        raise InputError(
            "--target: its logits are scaled or capped after the output matrix; no head can be fitted to it"
        )


def _fill(text: TargetText, model: nn.Module, feature_layers: tuple[int, ...], chosen: Tensor) -> None:
    """Run the chosen texts, padded at the end, where causal attention hides the padding, and keep the real rows."""
    lengths_B = text.lengths_R[chosen]
    positions_T = torch.arange(int(lengths_B.max()))
    real_BT = positions_T < lengths_B[:, None]
    at_BT = text.firsts_R[chosen][:, None] + positions_T.minimum(lengths_B[:, None] - 1)
    ids_BT = text.ids_N[at_BT].to(model.device)
    out = model.base_model(ids_BT, use_cache=False, output_hidden_states=list(feature_layers))
    final = out.last_hidden_state[real_BT]
    rows = at_BT[real_BT]
    text.features_NF[rows] = torch.cat([out.hidden_states[n] for n in feature_layers], -1)[real_BT].bfloat16().cpu()
    text.final_NH[rows] = final.bfloat16().cpu()
    text.best_N[rows] = model.get_output_embeddings()(final).argmax(-1).cpu()
