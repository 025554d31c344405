"""The Python front door: a decoder that owns its target, and `generate` for a model that is already loaded."""

from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ecospec.configs.schema import TargetConfig
from ecospec.inference.assemble import MethodPlan, PartsLoader, predictor_of
from ecospec.inference.config import DrafterConfig, SelectionConfig
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.statistics import Run
from ecospec.inference.drafters.base import BatchDrafter, Drafter
from ecospec.inference.drafters.kind import drafter_kind
from ecospec.inference.footprints import FootprintSource
from ecospec.inference.selection.config import EPSILON, selector
from ecospec.predictor.kinds.loading import kind_of_model
from ecospec.predictor.kinds.routing import RoutingModel
from ecospec.tracing.target.loading import Target, load_target


class EcoSpecDecoder:
    """A target with a drafter, a predictor and a selection policy; `generate` returns what `model.generate` would.

    `last_run` holds the last text's statistics: `acceptance_length`, `active_experts`, `tokens_per_second`, `steps`.
    """

    def __init__(self, target: Target, method: Method) -> None:
        self.target = target
        self.method = method
        self.last_run = Run()

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | DrafterConfig | None = None,
        predictor: str | None = None,
        policy: str = "marginal",
        gamma: int = 4,
        *,
        epsilon: float = EPSILON,
        footprints: str = "predictor",
        traces: str | None = None,
        **target_options,
    ) -> "EcoSpecDecoder":
        """Load everything. Without a drafter it decodes plainly; `target_options` are the keys of `target.*`.

        `drafter` is an EAGLE-3 head's folder, or a `DrafterConfig` for another kind or another tree; `predictor` the
        folder of the model that `footprints` names, where it is a trained kind; counted ones need `traces`.

        Raises InputError when a part is missing or belongs to another target.
        """
        loaded = load_target(TargetConfig(name=target, **target_options))
        drafts = drafter if isinstance(drafter, DrafterConfig) else DrafterConfig(path=drafter)
        plan = MethodPlan(
            label="EcoSpec",
            baseline=None if drafter else "none",
            drafter=drafter_kind(drafts.kind).complete(drafts, target),
            selection=SelectionConfig(policy, gamma, epsilon, footprints=footprints),
            predictor=predictor_of(target, predictor),
        )
        return cls(loaded, PartsLoader(loaded, traces).method(plan))

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **generation_kwargs,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`input_ids` int64 [B, T], left-padded where `attention_mask` is 0 → ids [B, T + new], prompts included.

        Takes what `model.generate` takes, and `generators`: one `torch.Generator` a text. Raises InputError for options
        that speculative decoding does not support.
        """
        out, self.last_run = generate_with(
            self.target.model,
            self.method,
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            streamer=streamer,
            **{"tokenizer": self.target.tokenizer, **generation_kwargs},
        )
        return out


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    drafter: Drafter | BatchDrafter,
    predictor: RoutingModel | FootprintSource | None = None,
    policy: str = "marginal",
    gamma: int = 4,
    epsilon: float = EPSILON,
    joint: bool = False,
    **generation_kwargs,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode with a loaded Transformers model and any object that has the drafter interface.

    `predictor` is a trained model of any kind with its embedding attached, or any footprint source; `joint`: a batch
    shares its budget and its experts. The other arguments are those of `EcoSpecDecoder.generate`. The hook for
    `model.generate(custom_generate=…)` is `CustomGenerate(Method(…))`.
    """
    footprints = kind_of_model(predictor).source(predictor) if isinstance(predictor, RoutingModel) else predictor
    method = Method(drafter, selector(policy, gamma, epsilon, joint), footprints)
    return generate_with(model, method, input_ids, **generation_kwargs)[0]
