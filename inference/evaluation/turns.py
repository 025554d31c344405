"""Conversations while they are decoded: a later turn follows the answers that were given to the turns before it.

Letters: T tokens.
"""

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ecospec.data.prompts import Prompt, after, answered
from ecospec.inference.config import DecodingConfig
from ecospec.tracing.target.loading import Target, context_of
from ecospec.tracing.target.requests import answer_text, encode, require_context


class Turns:
    """The answers so far to `target`'s prompts; they complete the turns that follow them."""

    def __init__(self, config: DecodingConfig, target: Target) -> None:
        self.config = config
        self.target = target
        self._answers: dict[str, tuple[str, ...]] = {}

    def complete(self, prompt: Prompt) -> Prompt:
        """`prompt` with its history. Raises InputError, naming it, when that makes it outgrow the target's context."""
        if prompt.follows is None:
            return prompt
        prompt = after(prompt, self._answers)
        requests = encode([prompt], self.target.tokenizer, teacher_force=False, chat_template=self.config.chat_template)
        require_context(requests, context_of(self.target.model.config), self.config.max_new_tokens)
        return prompt

    def note(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers, new token ids [T] each, to prompts that are complete."""
        for prompt, ids in zip(prompts, answers, strict=True):
            self._answers[prompt.sample_id] = answered(prompt, answer_text(ids, self.target.tokenizer))


def require_room(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    config: DecodingConfig,
) -> None:
    """Raises InputError, naming the sample, when a prompt cannot fit the context: the answers before it are taken to be
    empty, and as many tokens as may be generated are set aside for each of them."""
    answers: dict[str, tuple[str, ...]] = {}
    for prompt in prompts:
        unanswered = after(prompt, answers)
        answers[prompt.sample_id] = answered(unanswered, "")
        requests = encode([unanswered], tokenizer, teacher_force=False, chat_template=config.chat_template)
        require_context(requests, context_of(model_config), config.max_new_tokens * (1 + prompt.turn))
