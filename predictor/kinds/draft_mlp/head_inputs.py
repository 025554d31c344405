"""The hidden inputs of a draft head along recorded texts, at every depth of a draft: the target reads each text once.

The texts' own tokens stand for the drafts, as in the head's own training. Only these texts' tokens and routing teach a
draft MLP; branches that no text took were never routed.

Letters: B batch, T tokens, A depths (0: the root, so the head reads the target's features; a: its own output of a
steps), F width of the draft head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ecospec.data.module import BatchLimits, group_by_length
from ecospec.data.traces import Trace
from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.inference.drafters.eagle3.rollout import rollout
from ecospec.inference.target.features import FeatureTap
from ecospec.progress import progress

READ_TOKENS = 4096  # through the target at once
HEAD_INPUTS = "head_inputs"  # the column of a batch


@dataclass(frozen=True, eq=False)
class HeadInputTrace(Trace):
    """A trace with the head's hidden input at each token: bfloat16 [T, A, F], 0 where a draft would begin earlier."""

    head_inputs: Tensor = field(kw_only=True)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """See `Trace`."""
        return {HEAD_INPUTS: self.head_inputs}


def require_rollout(head: nn.Module) -> None:
    """Raises InputError for a draft head that cannot be rolled out along a text."""
    if not isinstance(head, Eagle3Head) or head.extra_layers or head.flags.post_norm_feedback:
        raise InputError(
            "--drafter.path: a draft MLP can be trained on EAGLE-3 heads of one layer that are fed their own output "
            "before its norm; train a predictor instead"
        )


@torch.inference_mode()
def read_head_inputs(model: nn.Module, head: Eagle3Head, items: Sequence[Trace], steps: int) -> list[HeadInputTrace]:
    """`items` with the hidden inputs of `head`, attached to the target `model`, in drafts `steps` tokens deep.

    Kept in memory: (steps + 1) · F numbers of two bytes a token. `head` is one that `require_rollout` passes.
    """
    found: dict[int, HeadInputTrace] = {}
    lengths = [len(item.input_ids) for item in items]
    groups = group_by_length(lengths, BatchLimits(tokens=READ_TOKENS), seed=0, epoch=0)
    for indices in progress(groups, "batches of text through target and head"):
        texts = [torch.from_numpy(items[index].input_ids.astype(np.int64)) for index in indices]
        ids_BT = pad_sequence(texts, batch_first=True).to(model.device)
        with FeatureTap(model, head.feature_layers) as tap:
            features_BTF = tap.read(model.base_model(ids_BT, use_cache=False, **tap.options))
        inputs_BTAF = inputs_at_depths(head, ids_BT, features_BTF, steps).bfloat16().cpu()
        for index, inputs_TAF in zip(indices, inputs_BTAF, strict=True):
            own_TAF = inputs_TAF[: lengths[index]].clone()
            found[index] = HeadInputTrace(**vars(items[index]), head_inputs=own_TAF)
    return [found[index] for index in range(len(items))]


def inputs_at_depths(head: Eagle3Head, ids_BT: Tensor, features_BTF: Tensor, steps: int) -> Tensor:
    """Hidden inputs [B, T, steps + 1, F]: at depth a, token t is a draft of the text that ends with token t - a."""
    T = ids_BT.shape[1]
    outputs = rollout(head, ids_BT, features_BTF, min(steps, T - 1))
    by_depth = [head.enter(features_BTF)[:, :-1], *outputs]
    inputs_BTAF = features_BTF.new_zeros(len(ids_BT), T, steps + 1, by_depth[0].shape[-1])
    for depth, hidden in enumerate(by_depth):
        inputs_BTAF[:, depth + 1 :, depth] = hidden[:, : T - depth - 1]
    return inputs_BTAF
