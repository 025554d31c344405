"""A small language model with the target's tokenizer as draft head.

Entry i is token i of the text; the output is the model's last hidden state, from which its output matrix makes the
logits. Its cache must drop entries and its attention must take a tree's mask, so models that keep a state, a window or
learned positions are refused.

Letters: B texts, T new entries, S cached and new entries, H hidden width, V ids that both models know.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ecospec.errors import InputError, brief, first_few
from ecospec.hub import hub_or_cache
from ecospec.inference.drafters.base import DraftHead
from ecospec.inference.target.masks import additive
from ecospec.tracing.target.loading import load_model

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  # the draft model's and the target's
MASKED = ("eager", "sdpa")  # attention implementations that take a mask as a tensor


class LanguageModelHead(DraftHead):
    """`model` drafts for a target with `target_vocab_size` ids.

    Without `tokenizers` both vocabularies must be of one size; with them they may be padded differently, and ids that
    only one of them has are never drafted. Raises InputError as `check_language_model` does, for a model whose logits
    are not its output matrix times its last hidden state, and for an attention that takes no mask.
    """

    feature_layers: Sequence[int] = ()
    first_token = 0

    def __init__(self, model: nn.Module, target_vocab_size: int, tokenizers: Tokenizers | None = None) -> None:
        check_language_model(model.config, target_vocab_size, tokenizers)
        _check_model(model)
        self.model = model
        self._known = model.config.get_text_config().vocab_size
        self._shared = min(self._known, target_vocab_size)

    def new_cache(self) -> Cache:
        """See `DraftHead`."""
        return DynamicCache()

    def forward(
        self, ids_BT: Tensor, hidden_BTH: None, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache
    ) -> Tensor:
        """See `DraftHead`."""
        return self.model.base_model(
            ids_BT.clamp(max=self._known - 1),  # an id of the target's padding must not end the text
            attention_mask=None if seen_BTS is None else additive(seen_BTS, self.model.dtype),
            position_ids=positions_BT,
            cache=cache,
            use_cache=True,
        ).last_hidden_state

    def feedback(self, out_BTH: Tensor) -> None:
        """See `DraftHead`: children are told nothing but their token."""

    def logits(self, out_BTH: Tensor) -> Tensor:
        """See `DraftHead`; the draft vocabulary is the V ids that both models know."""
        return self.model.get_output_embeddings()(out_BTH)[..., : self._shared].float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `DraftHead`."""
        return draft_ids


def load_language_model_head(
    source: str | Path,
    target_model: nn.Module,
    target_tokenizer: PreTrainedTokenizerBase,
    revision: str | None = None,
) -> LanguageModelHead:
    """The model at `source` (folder or hub id) in the target's dtype and on its device.

    What its configuration and tokenizer tell is checked before its weights are read. Raises InputError when it cannot
    be read, and as `LanguageModelHead` does.
    """
    target_vocab_size = target_model.config.get_text_config().vocab_size
    config, tokenizers = inspect_language_model(source, target_vocab_size, target_tokenizer, revision)
    try:
        model = load_model(source, f"draft model {source}", config, revision, dtype=target_model.dtype)
    except OSError as error:
        raise _unreadable(source, "its weights", error) from None
    model.to(target_model.device).requires_grad_(False).eval()
    return LanguageModelHead(model, target_vocab_size, tokenizers)


def inspect_language_model(
    source: str | Path, target_vocab_size: int, target_tokenizer: PreTrainedTokenizerBase, revision: str | None = None
) -> tuple[PreTrainedConfig, Tokenizers]:
    """Its configuration, and (its tokenizer, the target's); no weights. Raises InputError as the load does."""
    config = _read(AutoConfig, source, revision)
    tokenizers = (_read(AutoTokenizer, source, revision), target_tokenizer)
    check_language_model(config, target_vocab_size, tokenizers)
    return config, tokenizers


def _read(kind: type, source: str | Path, revision: str | None) -> object:
    try:
        with hub_or_cache(source):
            return kind.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(source, kind.__name__, error) from None


def _unreadable(source: str | Path, what: str, error: Exception) -> InputError:
    return InputError(f"--drafter.path {source}: cannot read a draft model there ({what}: {brief(error)})")


def check_language_model(
    config: PreTrainedConfig, target_vocab_size: int, tokenizers: Tokenizers | None = None
) -> None:
    """Raises InputError for a configuration or tokenizer that cannot draft for such a target."""
    text = config.get_text_config()
    name = f"draft model {config.name_or_path or config.model_type}"
    if tokenizers is not None:
        _check_tokenizers(*tokenizers, min(text.vocab_size, target_vocab_size))
    elif text.vocab_size != target_vocab_size:
        raise InputError(
            f"{name}: its vocabulary has {text.vocab_size} ids, the target's {target_vocab_size}; "
            "take a draft model with the target's tokenizer"
        )
    if config.is_encoder_decoder or getattr(text, "rope_parameters", None) is None:
        raise InputError(f"{name}: drafting takes a decoder with rotary positions")
    unfit = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers if not _drops(layer, text)})
    if unfit:
        raise InputError(
            f"{name}: its cache cannot drop a tree's entries ({first_few(unfit)}); take a full-attention one"
        )


def _drops(layer: object, config: PreTrainedConfig) -> bool:
    """Whether a full cache layer can stand in for `layer`; a window wider than any text is none."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window >= config.max_position_embeddings
    return type(layer) is DynamicLayer


def _check_tokenizers(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, shared: int) -> None:
    ours, theirs = draft.get_vocab(), target.get_vocab()
    names = f"draft tokenizer {draft.name_or_path} and target tokenizer {target.name_or_path}"
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        raise InputError(f"{names}: differ in {len(different)} tokens, as in {different[0]!r}; they must be the same")
    if max(ours.values()) >= shared:
        raise InputError(f"{names}: have ids up to {max(ours.values())}, but one of the models has only {shared}")


@torch.inference_mode()
def _check_model(model: nn.Module) -> None:
    name = f"draft model {model.config.name_or_path or model.config.model_type}"
    if getattr(model, "_is_stateful", False):
        raise InputError(f"{name}: keeps a recurrent state, from which a tree's entries cannot be dropped")
    if model.config._attn_implementation not in MASKED:
        raise InputError(f"{name}: its attention takes no tree mask; load it with attn_implementation='sdpa'")
    ids_1T = torch.arange(4, device=model.device)[None]
    final_1TH = model.base_model(ids_1T, use_cache=False).last_hidden_state
    logits_1TV = model(ids_1T, use_cache=False).logits
    if not torch.allclose(logits_1TV, model.get_output_embeddings()(final_1TH), rtol=1e-2, atol=1e-2):
        raise InputError(f"{name}: its logits are scaled or capped after the output matrix; take another")
