"""`generate` around the decoding loop: Transformers prepares, checks and stops; options we cannot honour are refused.

`model.generate` prepares each text alone, without its padding, so that every processor and criterion acts as it would
on the text alone; then all of them are decoded together. Called as a hook (`CustomGenerate`), the loop takes what
`model.generate` has prepared for the padded batch.

Letters: B texts, T tokens of the prompts, padding included.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ecospec.errors import InputError
from ecospec.inference.decoding.loop import SpeculativeLoop
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.picking import Picker, Row
from ecospec.inference.decoding.statistics import Run
from ecospec.inference.target.opening import open_session
from ecospec.inference.target.support import check_batch, check_cache, check_context, check_tree_support

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
MADE_FOR_A_BATCH = (  # processors that are given all texts of a batch when they are made
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)


@dataclass(frozen=True)
class Prepared:
    """What `model.generate` hands to a decoding method."""

    input_ids: Tensor
    logits_processor: Sequence
    stopping_criteria: Sequence
    generation_config: GenerationConfig
    cache: Cache


def generate_with(
    model: nn.Module,
    method: Method,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    seed: int = 0,
    **generation_kwargs,
) -> tuple[Tensor | GenerateDecoderOnlyOutput, Run]:
    """Decode with `method`: what `model.generate` returns, and the run's statistics.

    `input_ids` int64 [B, T], left-padded where `attention_mask` is 0. `generators`: one a text, by default the global
    one for a single text, and for a batch one a text seeded from it; `seed`: of the selector's own draws.
    Raises InputError for what is not supported.
    """
    options = {"generation_config": generation_config, **generation_kwargs}
    input_ids, mask_BT = _checked(input_ids, attention_mask, model, options)
    _stop_strings(options, model, tokenizer, stop_strings)
    refuse_unsupported(model, options)
    if len(input_ids) > 1 and (options.get("cache") or options.get("past_key_values")) is not None:
        raise InputError("cache: a batch is decoded with its own; leave it out")
    if streamer is not None:
        if len(input_ids) > 1:
            raise InputError("streamer: it takes one text; decode a batch without it")
        streamer.put(input_ids.cpu())
    texts = [ids_T[None, start:] for ids_T, start in zip(input_ids, _paddings(mask_BT), strict=True)]
    prepared = [_prepare(model, ids_1T, options, number) for number, ids_1T in enumerate(texts)]
    drawn_from = _generators(generators, input_ids, prepared[0].generation_config)
    pairs = zip(prepared, drawn_from, strict=True)
    rows = [Row(one.input_ids[0], _picker(one, generator)) for one, generator in pairs]
    on_tokens = streamer.put if streamer else lambda tokens: None
    out, statistics = run(model, method, rows, prepared, input_ids, on_tokens, seed)
    if streamer is not None:
        streamer.end()
    return out, statistics


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
        refuse_unsupported(model, vars(generation_config))
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask  # it has been inferred already
        input_ids, mask_BT = _checked(input_ids, mask, model, {})
        for processor in logits_processor if len(input_ids) > 1 else ():
            if isinstance(processor, MADE_FOR_A_BATCH):
                raise InputError(f"{type(processor).__name__} in a batch: use ecospec.inference.generate")
        cache = model_kwargs.get("cache")
        one = Prepared(input_ids, logits_processor, stopping_criteria, generation_config, cache)
        drawn_from = _generators(None, input_ids, generation_config)
        texts = enumerate(zip(input_ids, drawn_from, _paddings(mask_BT), strict=True))
        rows = [
            Row(ids_T, _picker(replace(one, logits_processor=_for_row(logits_processor, number)), generator), padding)
            for number, (ids_T, generator, padding) in texts
        ]
        out, self.last_run = run(model, self.method, rows, [one] * len(rows), input_ids)
        return out


def _for_row(processors: Sequence, number: int) -> LogitsProcessorList:
    """The processors of a whole batch as one text's: the repetition penalty knows each text's padding."""
    own = LogitsProcessorList()
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = processor.prompt_ignore_length[number : number + 1]
        own.append(processor)
    return own


def run(
    model: nn.Module,
    method: Method,
    rows: list[Row],
    prepared: list[Prepared],
    input_ids: Tensor,
    on_tokens: Callable[[Tensor], object] = lambda tokens: None,
    seed: int = 0,
) -> tuple[Tensor | GenerateDecoderOnlyOutput, Run]:
    """Decode the rows: their ids behind `input_ids`, padded as Transformers pads, and the run's statistics."""
    config, cache = prepared[0].generation_config, prepared[0].cache
    check_tree_support(model)
    check_context(model.config, max(one.generation_config.max_length for one in prepared))
    if cache is None:
        raise InputError("use_cache=False: speculative decoding needs the cache")
    if cache.get_seq_length():
        raise InputError("cache: it already holds tokens; begin with the whole text and an empty cache")
    if len(rows) > 1:
        check_batch(model.config)
        cache = DynamicCache()
    check_cache(cache)
    starts = [len(row.ids_T) for row in rows]
    session = open_session(model, cache, method.feature_layers, len(rows))
    statistics = SpeculativeLoop(session, method, on_tokens=on_tokens).decode(rows, seed)
    new = [row.ids_T[start:] for row, start in zip(rows, starts, strict=True)]
    width = max(len(ids) for ids in new)
    sequences = torch.cat([input_ids, input_ids.new_full((len(rows), width), _pad_id(config))], dim=1)
    for row, ids in zip(sequences, new, strict=True):
        row[input_ids.shape[1] :][: len(ids)] = ids
    if not config.return_dict_in_generate:
        return sequences, statistics
    own_cache = {} if len(rows) > 1 else {"cache": cache}
    return GenerateDecoderOnlyOutput(sequences=sequences, **own_cache), statistics


def refuse_unsupported(model: nn.Module, options: dict) -> None:
    """Raises InputError naming each option of `generate` that this decoder cannot honour."""
    for name, harmless in REFUSED.items():
        value = _option(model, options, name)
        if value not in harmless:
            raise InputError(f"{name}={value}: speculative decoding does not support it; leave it out")
    watermark = _option(model, options, "watermarking_config")
    if type(watermark).__name__ == "SynthIDTextWatermarkingConfig":
        raise InputError("watermarking_config: SynthID keeps state between tokens, which speculation would disturb")
    for name in ("assistant_model", "custom_generate", "inputs_embeds", "negative_prompt_ids", "synced_gpus"):
        if options.get(name) is not None:
            raise InputError(f"{name}: speculative decoding does not support it; leave it out")


def _option(model: nn.Module, options: dict, name: str) -> object:
    """What `generate` takes: the argument, else the given configuration's value, else the model's."""
    if name in options:
        return options[name]
    value = getattr(options.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _checked(
    input_ids: Tensor, attention_mask: Tensor | None, model: nn.Module, options: dict
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] on the model's device. Raises InputError for another shape, or padding that is not left."""
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids: give a tensor of token ids [B, T], not {type(input_ids).__name__}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InputError(f"input_ids of shape {list(input_ids.shape)}: give token ids as [B, T], at least one token")
    input_ids = input_ids.to(model.device)
    if attention_mask is None:
        attention_mask = _inferred_mask(model, input_ids, options)
    mask = attention_mask.to(model.device).long()
    if mask.shape != input_ids.shape:
        raise InputError(f"attention_mask of shape {list(mask.shape)}: give one entry a token, {list(input_ids.shape)}")
    if not bool((mask.sort(1).values == mask).all() and mask[:, -1].all()):
        raise InputError(
            "attention_mask: pad on the left (padding_side='left'), so that a text ends with its own token"
        )
    return input_ids, mask


def _inferred_mask(model: nn.Module, input_ids: Tensor, options: dict) -> Tensor:
    """The mask that Transformers infers: pad tokens are padding unless they may also end a text."""
    pad, eos = _option(model, options, "pad_token_id"), _option(model, options, "eos_token_id")
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        return torch.ones_like(input_ids)
    return input_ids != pad


def _prepare(model: nn.Module, ids_1T: Tensor, options: dict, number: int) -> Prepared:
    """Let `model.generate` prepare one text, the batch's `number`-th, as it would for any decoding method."""
    caught = []
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        options = {**options, "prefix_allowed_tokens_fn": lambda _, ids_T: allowed(number, ids_T)}

    def catch(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs) -> Tensor:
        parts = (input_ids, logits_processor, stopping_criteria, generation_config)
        caught.append(Prepared(*parts, kwargs.get("cache")))
        return input_ids

    with _without_stop_strings(model.generation_config):
        model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), custom_generate=catch, **options)
    return caught[0]


@contextmanager
def _without_stop_strings(config: GenerationConfig) -> Iterator[None]:
    """The model's own are a criterion already; `generate` would ask for a tokenizer that it keeps from custom loops."""
    strings, config.stop_strings = config.stop_strings, None
    try:
        yield
    finally:
        config.stop_strings = strings


def _picker(prepared: Prepared, generator: torch.Generator | None) -> Picker:
    parts = (prepared.logits_processor, prepared.stopping_criteria, prepared.generation_config.do_sample)
    return Picker(*parts, generator)


def _paddings(mask_BT: Tensor) -> list[int]:
    """Ids before each text."""
    return (1 - mask_BT.long()).sum(1).tolist()


def _generators(
    given: Sequence[torch.Generator] | None, input_ids: Tensor, config: GenerationConfig
) -> list[torch.Generator | None]:
    """One a text; greedy decoding draws nothing. Raises InputError when their number is not the texts'."""
    if given is not None:
        if len(given) != len(input_ids):
            raise InputError(f"generators: {len(given)} for {len(input_ids)} texts; give one a text")
        return list(given)
    if len(input_ids) == 1 or not config.do_sample:
        return [None] * len(input_ids)
    seeds = torch.randint(2**62, (len(input_ids),)).tolist()
    return [torch.Generator(input_ids.device).manual_seed(seed) for seed in seeds]


def _stop_strings(
    options: dict, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, given: str | list[str] | None
) -> None:
    """Turn stop strings into a criterion, as `generate` keeps the tokenizer that they need from custom loops."""
    config = options["generation_config"]
    strings = given or _option(model, options, "stop_strings")
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
