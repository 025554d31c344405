"""Multi-token-prediction layers as a kind; see `ecospec.inference.drafters.kind`."""

from typing import TYPE_CHECKING

from ecospec.inference.drafters.kind import DrafterKind, Facts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.mtp.head import MtpHead
    from ecospec.tracing.target.loading import Target


class MtpKind(DrafterKind):
    """Read from the target's own checkpoint, unless `drafter.path` names another."""

    has_hidden = True
    order = 1

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """See `DrafterKind`."""
        from ecospec.inference.drafters.mtp.head import inspect_mtp
        from ecospec.tracing.target.names import resolve_target

        source = config.path or resolve_target(target.name)
        summary = inspect_mtp(source, model_config, target.revision)
        value = f"MTP {summary.layers} of {source}, {summary.weights / 1e6:.1f} M weights"
        return Facts(value, model_config.vocab_size, model_config.hidden_size)

    def load_head(self, config: "DrafterConfig", target: "Target") -> "MtpHead":
        """See `DrafterKind`."""
        from ecospec.inference.drafters.mtp.head import load_mtp_head

        return load_mtp_head(config.path or target.path, target.model)


KIND = MtpKind()
