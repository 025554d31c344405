"""Prompt lookup as a kind; see `ecospec.inference.drafters.kind`."""

from typing import TYPE_CHECKING

from ecospec.inference.drafters.kind import DrafterKind, Facts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.base import EachRow


class PromptLookupKind(DrafterKind):
    """Earlier occurrences of the text's ending: nothing to load."""

    reads_path = False
    order = 3

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """See `DrafterKind`."""
        return Facts("earlier occurrences in the text")

    def drafter(self, head: None, config: "DrafterConfig") -> "EachRow":
        """See `DrafterKind`."""
        from ecospec.inference.drafters.base import EachRow
        from ecospec.inference.drafters.prompt_lookup.lookup import PromptLookupDrafter

        return EachRow(PromptLookupDrafter(config.steps, config.topk))


KIND = PromptLookupKind()
