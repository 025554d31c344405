"""A target session on a Transformers model: its cache, tree masks, recorded routing and tapped hidden states.

Letters: B texts, T tokens of the longest text, N nodes of the widest tree (root first), V vocabulary.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.features import FeatureTap
from ecospec.inference.target.masks import tree_masks
from ecospec.inference.target.session import Pass, TargetSession
from ecospec.inference.tree import DraftTrees
from ecospec.tracing.target.recorder import RoutingRecorder


class TransformersSession(TargetSession):
    """Passes of `model` on `cache`, which is empty, and for several texts a plain `DynamicCache`.

    `feature_layers` as in `Drafter`. Raises InputError for a layer that the model does not have.
    """

    def __init__(self, model: nn.Module, cache: Cache, feature_layers: Sequence[int] = (), rows: int = 1) -> None:
        self.model = model
        self.device = model.device
        self.cache = RowCache(cache, [0] * rows)
        self._hooks = ExitStack()
        self._tap = FeatureTap(model, feature_layers)
        self._recorder = RoutingRecorder(model)
        self._entries = 0  # a text got in the last pass

    def __enter__(self) -> "TransformersSession":
        with ExitStack() as hooks:  # should one fail to enter, the other leaves
            hooks.enter_context(self._tap)
            hooks.enter_context(self._recorder)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def prefill(self, texts: list[Tensor]) -> Pass:
        """See `TargetSession`. Texts are padded behind, where causal attention hides the padding."""
        counts, ids_BT = [len(text_T) for text_T in texts], pad_sequence(texts, batch_first=True)
        ends = sorted({count - 1 for count in counts})
        out = self.model(
            input_ids=ids_BT,
            cache=self.cache.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=ids_BT.device),
            **self._tap.options,
        )
        self.cache.cache.activate_past_recording()
        self.cache.keep_first(counts, ids_BT.shape[1])
        last = [ends.index(count - 1) for count in counts]
        return self._told(out, out.logits[torch.arange(len(texts)), last][:, None], ids_BT.shape)

    def verify(self, trees: DraftTrees) -> Pass:
        """See `TargetSession`: nodes are appended to the cache in their order."""
        out = verify(self.model, self.cache, trees, **self._tap.options)
        self._entries = trees.width
        return self._told(out, out.logits, trees.tokens_BN.shape)

    def keep(self, paths: list[list[int]]) -> None:
        """See `TargetSession`."""
        self.cache.keep(paths, self._entries)

    def keep_rows(self, rows: list[int]) -> None:
        """See `TargetSession`."""
        self.cache.keep_rows(rows)

    def _told(self, out: object, logits_BNV: Tensor, shape: torch.Size) -> Pass:
        return Pass(logits_BNV, self._recorder.take().unflatten(0, shape), self._tap.read(out))


def verify(model: nn.Module, cache: RowCache, trees: DraftTrees, **forward_options) -> object:
    """The target's output for every node of `trees`, appended to `cache` in node order; options pass through."""
    alone = len(trees) == 1 and trees.width == 1
    lengths_B = cache.lengths_B(trees.tokens_BN.device)
    return model(
        input_ids=trees.tokens_BN,
        attention_mask=None if alone else tree_masks(model, cache, trees, lengths_B),
        position_ids=trees.depth_BN + lengths_B[:, None],
        cache=cache.cache,
        use_cache=True,
        **forward_options,
    )
