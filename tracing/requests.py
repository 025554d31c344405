"""Prompts as token ids: what an engine is asked to trace. Knows nothing about models.

Letters: T tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ecospec.configs.errors import InputError
from ecospec.configs.files import sha256_json
from ecospec.data.prompts import Prompt


@dataclass(frozen=True)
class Request:
    """One sequence to trace: generate after `prompt_ids`, or run `prompt_ids + answer_ids` where an answer is given."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int] | None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + (self.answer_ids or [])


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, teacher_force: bool) -> list[Request]:
    """Token ids of the prompts, and of their answers under `teacher_force`; the two are joined as token lists.

    Raises InputError, naming the sample, when it has no tokens or lacks the answer to be forced.
    """
    requests = []
    for prompt in prompts:
        if teacher_force and not prompt.answer:
            raise InputError(f"sample {prompt.sample_id} has no `answer`, which --teacher_force needs")
        prompt_ids = tokenizer(prompt.text)["input_ids"]
        if not prompt_ids:
            raise InputError(f"sample {prompt.sample_id}: its prompt has no tokens; remove the row")
        answer_ids = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"] if teacher_force else None
        requests.append(Request(prompt, prompt_ids, answer_ids))
    return requests


def tokens_needed(request: Request, max_new_tokens: int) -> int:
    """Tokens that go through the model at most: the last new one never does."""
    return len(request.ids) + (0 if request.answer_ids is not None else max_new_tokens - 1)


def require_context(requests: Sequence[Request], context: int | None, max_new_tokens: int) -> None:
    """Raises InputError, naming the sample, when a sequence would outgrow the model's `context` (in tokens)."""
    for request in requests:
        tokens = tokens_needed(request, max_new_tokens)
        if context is not None and tokens > context:
            raise InputError(
                f"sample {request.prompt.sample_id} needs {tokens} tokens but the target's context is {context}; "
                "shorten it or lower --max_new_tokens"
            )


def request_key(identity: dict, request: Request) -> str:
    """sha256 over sample id, token ids and `identity` (target, engine, generation settings, schema)."""
    return sha256_json([identity, request.prompt.sample_id, request.prompt_ids, request.answer_ids])


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the whole tokenizer, merges and normalisers included, or of its vocabulary where it is a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sha256_json(tokenizer.get_vocab())
    return hashlib.sha256(backend.to_str().encode()).hexdigest()
