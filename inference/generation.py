"""`generate` around the decoding loop: Transformers prepares, checks and stops; options we cannot honour are refused.

For one text `model.generate` calls the loop itself. For a batch each text is prepared alone, without its padding, so
that every processor and criterion acts as it would on the text alone, and all of them are decoded together.

Letters: B texts, T tokens of the prompts, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ecospec.configs.errors import InputError
from ecospec.inference.decoder import Method, SpeculativeLoop
from ecospec.inference.picking import Picker, Row
from ecospec.inference.statistics import Run
from ecospec.inference.verification import check_batch, check_cache, check_context, check_tree_support
from ecospec.tracing.recorder import RoutingRecorder

REFUSED = {  # option of GenerationConfig: the values that change nothing
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "num_beam_groups": (1, None),
    "guidance_scale": (1, 1.0, None),
    "penalty_alpha": (0, None),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (False, None),
    "speculation_type": (None,),
    "token_healing": (False, None),
    "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic", "dynamic_full"),
    "use_cache": (True, None),
    "output_scores": (False, None),
    "output_logits": (False, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}


@dataclass(frozen=True)
class Prepared:
    """What `model.generate` hands to a decoding method."""

    input_ids: Tensor
    logits_processor: Sequence
    stopping_criteria: Sequence
    generation_config: GenerationConfig
    cache: Cache
    attention_mask: Tensor | None


def generate_with(
    model: nn.Module,
    method: Method,
    input_ids: Tensor,
    *,
    recorder: RoutingRecorder,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    **generation_kwargs,
) -> tuple[Tensor | GenerateDecoderOnlyOutput, Run]:
    """Decode with `method`: what `model.generate` returns, and the run's statistics.

    `input_ids` int64 [B, T], left-padded where `attention_mask` is 0. `generators`: one a text, by default the global
    one for a single text, and for a batch one a text seeded from it. Raises InputError for what is not supported.
    """
    input_ids, mask_BT = _checked(input_ids, attention_mask, model.device)
    options = {"generation_config": generation_config, **generation_kwargs}
    _stop_strings(options, model, tokenizer, stop_strings)
    refuse_unsupported(model, options)
    if streamer is not None:
        if len(input_ids) > 1:
            raise InputError("streamer: it takes one text; decode a batch without it")
        streamer.put(input_ids.cpu())
    loop = SpeculativeLoop(model, method, recorder, streamer.put if streamer else lambda tokens: None)
    starts = (1 - mask_BT.long()).sum(1).tolist()
    prepared = [_prepare(model, ids_T[None, start:], options) for ids_T, start in zip(input_ids, starts, strict=True)]
    rows = [_row(one, generator) for one, generator in zip(prepared, _generators(generators, input_ids), strict=True)]
    out = run(loop, rows, prepared, input_ids)
    if streamer is not None:
        streamer.end()
    return out, loop.run


class CustomGenerate:
    """A callable for `model.generate(custom_generate=…)`; `last_run` holds the statistics of the last call.

    Transformers passes it neither streamers nor the tokenizer for stop strings; `ecospec.inference.generate` does.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.last_run = Run()

    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The ids, as any decoding method of Transformers returns them."""
        refuse_unsupported(model, {"generation_config": generation_config})
        mask = model_kwargs.get("attention_mask")
        input_ids, mask_BT = _checked(input_ids, mask, model.device)
        cache = model_kwargs.get("cache")
        one = Prepared(input_ids, logits_processor, stopping_criteria, generation_config, cache, mask)
        picker = [_row(one, generator).picker for generator in _generators(None, input_ids)]
        paddings = (1 - mask_BT.long()).sum(1).tolist()
        rows = [Row(*row) for row in zip(input_ids, picker, paddings, strict=True)]
        with RoutingRecorder(model) as recorder:
            loop = SpeculativeLoop(model, self.method, recorder)
            out = run(loop, rows, [one] * len(rows), input_ids)
        self.last_run = loop.run
        return out


def run(
    loop: SpeculativeLoop, rows: list[Row], prepared: list[Prepared], input_ids: Tensor
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode the rows and put their ids behind `input_ids`, padded as Transformers pads."""
    config, cache = prepared[0].generation_config, prepared[0].cache
    check_tree_support(loop.model)
    check_context(loop.model.config, max(one.generation_config.max_length for one in prepared))
    if cache is None:
        raise InputError("use_cache=False: speculative decoding needs the cache")
    if cache.get_seq_length():
        raise InputError("cache: it already holds tokens; begin with the whole text and an empty cache")
    if len(rows) > 1:
        check_batch(loop.model.config)
        cache = DynamicCache()
    check_cache(cache)
    starts = [len(row.ids_T) for row in rows]
    loop.decode(rows, cache)
    new = [row.ids_T[start:] for row, start in zip(rows, starts, strict=True)]
    width = max(len(ids) for ids in new)
    sequences = torch.cat([input_ids, input_ids.new_full((len(rows), width), _pad_id(config))], dim=1)
    for row, ids in zip(sequences, new, strict=True):
        row[input_ids.shape[1] :][: len(ids)] = ids
    if not config.return_dict_in_generate:
        return sequences
    if len(rows) > 1:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    cache.crop(sequences.shape[1] - 1 - int(cache.get_seq_length()))  # a text that ends inside a step
    return GenerateDecoderOnlyOutput(sequences=sequences, cache=cache)


def refuse_unsupported(model: nn.Module, options: dict) -> None:
    """Raises InputError naming each option of `generate` that this decoder cannot honour."""
    config = options.get("generation_config") or model.generation_config
    for name, harmless in REFUSED.items():
        value = options.get(name, getattr(config, name, None))
        if value not in harmless:
            raise InputError(f"{name}={value}: speculative decoding does not support it; leave it out")
    watermark = options.get("watermarking_config", getattr(config, "watermarking_config", None))
    if type(watermark).__name__ == "SynthIDTextWatermarkingConfig":
        raise InputError("watermarking_config: SynthID keeps state between tokens, which speculation would disturb")
    for name in ("assistant_model", "custom_generate", "inputs_embeds", "negative_prompt_ids", "synced_gpus"):
        if options.get(name) is not None:
            raise InputError(f"{name}: speculative decoding does not support it; leave it out")


def _checked(input_ids: Tensor, attention_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] on the model's device. Raises InputError for another shape, or padding that is not left."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InputError(f"input_ids of shape {list(input_ids.shape)}: give token ids as [B, T], at least one token")
    input_ids = input_ids.to(device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(device).long()
    if mask.shape != input_ids.shape:
        raise InputError(f"attention_mask of shape {list(mask.shape)}: give one entry a token, {list(input_ids.shape)}")
    if not bool((mask.sort(1).values == mask).all() and mask[:, -1].all()):
        raise InputError(
            "attention_mask: pad on the left (padding_side='left'), so that a text ends with its own token"
        )
    return input_ids, mask


def _prepare(model: nn.Module, ids_1T: Tensor, options: dict) -> Prepared:
    """Let `model.generate` prepare one text as it would for any decoding method."""
    caught = []

    def catch(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs) -> Tensor:
        parts = (input_ids, logits_processor, stopping_criteria, generation_config)
        caught.append(Prepared(*parts, kwargs.get("cache"), kwargs.get("attention_mask")))
        return input_ids

    model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), custom_generate=catch, **options)
    return caught[0]


def _row(prepared: Prepared, generator: torch.Generator | None) -> Row:
    parts = (prepared.logits_processor, prepared.stopping_criteria, prepared.generation_config.do_sample)
    return Row(prepared.input_ids[0], Picker(*parts, generator))


def _generators(given: Sequence[torch.Generator] | None, input_ids: Tensor) -> list[torch.Generator | None]:
    """One a text. Raises InputError when their number is not the texts'."""
    if given is not None:
        if len(given) != len(input_ids):
            raise InputError(f"generators: {len(given)} for {len(input_ids)} texts; give one a text")
        return list(given)
    if len(input_ids) == 1:
        return [None]
    seeds = torch.randint(2**62, (len(input_ids),)).tolist()
    return [torch.Generator(input_ids.device).manual_seed(seed) for seed in seeds]


def _stop_strings(
    options: dict, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, given: str | list[str] | None
) -> None:
    """Turn stop strings into a criterion, as `generate` keeps the tokenizer that they need from custom loops."""
    config = options["generation_config"] or model.generation_config
    strings = given or getattr(config, "stop_strings", None)
    if not strings:
        return
    if tokenizer is None:
        raise InputError("stop_strings: give the tokenizer too (tokenizer=…)")
    if getattr(config, "stop_strings", None):
        options["generation_config"] = GenerationConfig(**{**config.to_dict(), "stop_strings": None})
    criteria = options.get("stopping_criteria") or []
    options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


def _pad_id(config: GenerationConfig) -> int:
    """What Transformers fills finished texts of a batch with."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    eos = config.eos_token_id
    return (eos[0] if isinstance(eos, list) else eos) or 0
