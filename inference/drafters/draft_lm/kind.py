"""A small language model as a kind; see `ecospec.inference.drafters.kind`."""

from typing import TYPE_CHECKING

from ecospec.errors import InputError
from ecospec.inference.drafters.kind import DrafterKind, Facts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.draft_lm.head import LanguageModelHead
    from ecospec.tracing.target.loading import Target


class LanguageModelKind(DrafterKind):
    """A folder or hub id of a model with the target's tokenizer."""

    order = 2

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """See `DrafterKind`."""
        from ecospec.inference.drafters.draft_lm.head import inspect_language_model
        from ecospec.tracing.target.loading import load_tokenizer

        vocab_size = model_config.get_text_config().vocab_size
        draft, _ = inspect_language_model(_source(config), vocab_size, load_tokenizer(target, vocab_size))
        return Facts(f"{config.path} ({draft.model_type})", draft.get_text_config().vocab_size)

    def load_head(self, config: "DrafterConfig", target: "Target") -> "LanguageModelHead":
        """See `DrafterKind`."""
        from ecospec.inference.drafters.draft_lm.head import load_language_model_head

        return load_language_model_head(_source(config), target.model, target.tokenizer)


def _source(config: "DrafterConfig") -> str:
    """Folder or hub id of the draft model. Raises InputError when none is named."""
    from ecospec.tracing.target.names import resolve_target

    if config.path is None:
        raise InputError("--drafter.path: not given; say which draft model, a folder or hub id")
    return resolve_target(config.path)


KIND = LanguageModelKind()
