"""EAGLE-3 heads as a kind; see `ecospec.inference.drafters.kind`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ecospec.inference.drafters.eagle3.config import Eagle3Keys
from ecospec.inference.drafters.kind import DrafterKind, Facts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.eagle3.head import Eagle3Head
    from ecospec.tracing.target.loading import Target


class Eagle3Kind(DrafterKind):
    """A trained head in a folder or on the hub, of any known writer."""

    keys = Eagle3Keys
    ships_with_lab = has_hidden = True
    order = 0

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """See `DrafterKind`."""
        from ecospec.inference.drafters.eagle3.checkpoint import inspect_head

        folder = self.learnt_from(config)
        spec = inspect_head(folder, model_config, config.feature_layers, config.rope_theta)
        D = spec.config.draft_vocab_size
        value = f"{folder}, {spec.writer}, draft vocabulary {D}, layers {list(spec.feature_layers)}"
        return Facts(value, D, spec.config.hidden_size, spec.notes)

    def learnt_from(self, config: "DrafterConfig") -> Path:
        """See `DrafterKind`. Raises InputError when there is no such folder."""
        from ecospec.tracing.target.names import part_folder

        return part_folder(config.path, "drafter")

    def load_head(self, config: "DrafterConfig", target: "Target") -> "Eagle3Head":
        """See `DrafterKind`."""
        from ecospec.inference.drafters.eagle3.checkpoint import load_head

        model = target.model
        head = load_head(self.learnt_from(config), model.config, config.feature_layers, config.rope_theta)
        return head.attach(model).to(model.get_input_embeddings().weight.device)


KIND = Eagle3Kind()
