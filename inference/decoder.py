"""The decoding loop: draft, predict, select, verify, accept, as a callable for `model.generate(custom_generate=…)`.

Verification picks each token exactly as plain decoding would (same processors, same random draws in the same order) and
follows the child that equals it. Drafts are a deterministic function of the text, so this is lossless at every
temperature, and a draft is accepted with the probability the target gives it: the same law as recursive rejection
sampling with point-mass proposals.

Letters: T tokens of the text, N nodes of a tree, F width of the drafter's features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ecospec.configs.errors import InputError
from ecospec.inference.drafters.base import Drafter
from ecospec.inference.footprints import FootprintSource
from ecospec.inference.selection import EPSILON, NEEDS_FOOTPRINTS, check_selection, select
from ecospec.inference.statistics import Run, Step, StepClock
from ecospec.inference.tree import DraftTree, root_only
from ecospec.inference.verification import check_cache, check_tree_support, compact, verify
from ecospec.tracing.recorder import RoutingRecorder


@dataclass
class Method:
    """How one method decodes: who drafts, what selects, and where footprints come from. No drafter: plain decoding."""

    drafter: Drafter | None = None
    policy: str = "marginal"
    gamma: int = 4
    epsilon: float = EPSILON
    footprints: FootprintSource | None = None
    seed: int = 0  # of the policy `random`, whose draws must not touch those of sampling

    def __post_init__(self) -> None:
        check_selection(self.policy, self.gamma)
        if self.drafter is not None and self.policy in NEEDS_FOOTPRINTS and self.footprints is None:
            raise InputError(f"--selection.policy {self.policy}: needs footprints; give a predictor or --footprints")

    def reset(self) -> None:
        """Begin a new text."""
        self.generator = torch.Generator().manual_seed(self.seed)
        for part in (self.drafter, self.footprints):
            if part is not None:
                part.reset()


class SpeculativeLoop:
    """Decodes one text. An instance is what `model.generate(custom_generate=…)` calls after its own preparation."""

    def __init__(self, method: Method, recorder: RoutingRecorder, on_tokens: Callable[[Tensor], object] | None = None):
        self.method = method
        self.recorder = recorder
        self.on_tokens = on_tokens or (lambda tokens: None)
        self.run = Run()

    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ) -> Tensor | GenerateDecoderOnlyOutput:
        self._check(model, input_ids, model_kwargs)
        self.picker = Picker(logits_processor, stopping_criteria, generation_config.do_sample)
        cache = model_kwargs["cache"]
        self.method.reset()
        ids, features, done = self._prefill(model, input_ids, cache)
        clock = StepClock(input_ids.device)
        while not done:
            ids, features, done = self._step(model, ids, features, cache)
        self.run.decode_seconds = clock.total()
        self.run.new_tokens = ids.shape[1] - input_ids.shape[1]
        if generation_config.return_dict_in_generate:
            cache.crop(ids.shape[1] - 1 - int(cache.get_seq_length()))  # a text that ends inside a step
            return GenerateDecoderOnlyOutput(sequences=ids, cache=cache)
        return ids

    def _check(self, model: nn.Module, input_ids: Tensor, model_kwargs: dict) -> None:
        if input_ids.shape[0] != 1:
            raise InputError(f"batch of {input_ids.shape[0]} texts: one text at a time is supported")
        if model_kwargs.get("cache") is None:
            raise InputError("use_cache=False: speculative decoding needs the cache")
        if model_kwargs["cache"].get_seq_length():
            raise InputError("cache: it already holds tokens; begin with the whole text and an empty cache")
        if model_kwargs.get("attention_mask") is not None and not model_kwargs["attention_mask"].all():
            raise InputError("attention_mask: a single text needs no padding; remove the padded tokens")
        check_tree_support(model)
        check_cache(model_kwargs["cache"])

    def _options(self) -> dict:
        layers = self.method.drafter.feature_layers if self.method.drafter else ()
        return {"output_hidden_states": list(layers)} if layers else {}

    def _prefill(self, model: nn.Module, ids: Tensor, cache) -> tuple[Tensor, Tensor | None, bool]:
        clock = StepClock(ids.device)
        out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **self._options())
        cache.activate_past_recording()
        self.recorder.take()
        features = self._features(out)
        ids, done = self.picker.take(ids, out.logits[:, -1])
        self.run.prefill_seconds = clock.total()
        self.on_tokens(ids[0, -1:])
        return ids, features, done

    def _step(self, model: nn.Module, ids: Tensor, features: Tensor | None, cache) -> tuple:
        clock = StepClock(ids.device)
        tree = self._propose(ids[0], features, clock)
        with clock.phase("verify"):
            out = verify(model, cache, tree, **self._options())
            experts_NLK = self.recorder.take()
        with clock.phase("accept"):
            emitted, kept, uncut, done = walk(tree, out.logits, ids, self.picker)
            compact(cache, len(tree), kept)
            features = self._features(out, kept)
            self.on_tokens(emitted[0, ids.shape[1] :])
        self.run.steps.append(Step(uncut, len(tree), experts_NLK, clock.seconds, clock.total()))
        return emitted, features, done

    def _propose(self, ids_T: Tensor, features: Tensor | None, clock: StepClock) -> DraftTree:
        method = self.method
        if method.drafter is None or method.gamma == 1:
            return root_only(ids_T[-1])
        with clock.phase("draft"):
            tree = method.drafter.draft(ids_T, features)
        with clock.phase("predict"):
            footprints = method.footprints.footprints(ids_T, tree) if method.footprints else None
        with clock.phase("select"):
            chosen = select(tree, footprints, method.policy, method.gamma, method.epsilon, generator=method.generator)
            return tree.subtree(chosen)

    def _features(self, out, kept: list[int] | None = None) -> Tensor | None:
        """Concatenated hidden states [n, F] of the whole pass, or of the `kept` nodes."""
        if not self.method.drafter or not self.method.drafter.feature_layers:
            return None
        rows = [out.hidden_states[layer][0] for layer in self.method.drafter.feature_layers]
        return torch.cat([row if kept is None else row[kept] for row in rows], dim=-1)


class Picker:
    """Chooses the next token as Transformers' own sampling loop does, one row at a time."""

    def __init__(self, logits_processor, stopping_criteria, do_sample: bool) -> None:
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.do_sample = do_sample

    def take(self, ids_1T: Tensor, logits_1V: Tensor) -> tuple[Tensor, bool]:
        """The text with its next token, and whether it ends there."""
        scores = self.logits_processor(ids_1T, logits_1V.to(torch.float32, copy=True))
        token = torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)
        ids_1T = torch.cat([ids_1T, token], dim=1)
        return ids_1T, bool(self.stopping_criteria(ids_1T, None).all())


def walk(tree: DraftTree, logits_1NV: Tensor, ids_1T: Tensor, picker: Picker) -> tuple[Tensor, list[int], int, bool]:
    """Follow the target's own choices down the tree.

    Returns the text with the emitted tokens (cut where it ends), the nodes of the accepted path (root first), how many
    tokens were emitted had the text not ended, and whether it has ended.
    """
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    node, kept, end = 0, [0], None
    start = ids_1T.shape[1]
    while True:
        ids_1T, done = picker.take(ids_1T, logits_1NV[:, node])
        if done and end is None:
            end, state_at_end = ids_1T.shape[1], _random_state(ids_1T.device)
        token = int(ids_1T[0, -1])
        children = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == token]
        if not children:
            break
        node = children[0]
        kept.append(node)
    if end is not None:
        _random_state(ids_1T.device, state_at_end)  # draws past the end must not show in the next text
    return ids_1T[:, :end], kept, ids_1T.shape[1] - start, end is not None


def _random_state(device: torch.device, state: Tensor | None = None) -> Tensor:
    """The state of the generator that sampling on `device` draws from, after setting it where `state` is given."""
    random = torch.cuda if device.type == "cuda" else torch
    if state is not None:
        random.set_rng_state(state)
    return random.get_rng_state()


def generate_with(
    model: nn.Module,
    method: Method,
    input_ids: Tensor,
    *,
    recorder: RoutingRecorder,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    **generation_kwargs,
) -> tuple[Tensor | GenerateDecoderOnlyOutput, Run]:
    """Decode one text with `method`: what `model.generate` returns, and the run's statistics."""
    loop = SpeculativeLoop(method, recorder, streamer.put if streamer else None)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    out = model.generate(input_ids, generation_config=generation_config, custom_generate=loop, **generation_kwargs)
    if streamer is not None:
        streamer.end()
    return out, loop.run
