"""The header of a job: whatever can change which rows it writes."""

from collections.abc import Sequence
from dataclasses import asdict

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt
from ecospec.errors import InputError
from ecospec.files import sha256_json
from ecospec.tracing.config import RunConfig
from ecospec.tracing.store.layout import id_dtype
from ecospec.tracing.store.manifest import Header, PromptSource, TracedTarget
from ecospec.tracing.target.loading import MoeShape, config_hash, weights_hash
from ecospec.tracing.target.requests import tokenizer_sha256

KEYED = ("schema", "target", "engine", "generation")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "seed")  # mean nothing for answers that are forced


def trace_header(
    config: RunConfig,
    model_config: PreTrainedConfig,
    shape: MoeShape,
    engine: dict,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
) -> Header:
    """`engine` is what the engine says of itself."""
    return Header(
        target=TracedTarget(
            name=config.target.name,
            revision=config.target.revision,
            dtype=_dtype_name(config.target, model_config),
            config_sha256=config_hash(model_config),
            weights_sha256=weights_hash(config.target) if config.engine.kind == "transformers" else None,
            experts_implementation=config.target.experts_implementation,
            expert_mib=config.target.expert_mib,
        ),
        engine=engine,
        family=shape.family,
        vocab_size=shape.vocab_size,
        moe_layers=list(shape.layers),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        id_dtype=id_dtype(shape.num_experts).name,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        prompts=prompt_sources(prompts),
        generation={
            **{name: None if config.teacher_force else getattr(config, name) for name in SAMPLING},
            "teacher_force": config.teacher_force,
            "chat_template": config.chat_template,
            "batch_size": config.batch_size,
        },
    )


def key_identity(header: Header) -> dict:
    """What of a header each sample's key depends on."""
    values = asdict(header)
    return {name: values[name] for name in KEYED}


def prompt_sources(prompts: Sequence[Prompt]) -> list[PromptSource]:
    """Each data set with its number of samples and a hash of their texts."""
    texts: dict[str, list] = {}
    for prompt in prompts:
        texts.setdefault(prompt.dataset, []).append([prompt.sample_id, prompt.text, prompt.answer])
    return [PromptSource(dataset=name, samples=len(rows), sha256=sha256_json(rows)) for name, rows in texts.items()]


def _dtype_name(target: TargetConfig, model_config: PreTrainedConfig) -> str:
    if target.dtype != "auto":
        return target.dtype
    if model_config.dtype is None:
        raise InputError(f"--target.name {target.name}: its config does not say its dtype; give --target.dtype")
    return str(model_config.dtype).removeprefix("torch.")
