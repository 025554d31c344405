"""Prompts as token ids: what a target is asked, in tracing and in decoding. Knows nothing about models.

Letters: T tokens.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
from transformers import PreTrainedTokenizerBase

from ecospec.data.prompts import Prompt, after, answered
from ecospec.errors import InputError, brief
from ecospec.files import sha256_json

TEMPLATE_DATE = datetime(2025, 1, 1)
_DATE_PARTS = " | ".join(f"replace('%{part}', '{TEMPLATE_DATE.strftime('%' + part)}')" for part in "YymdBbAaHMSjIp")
_FIXED_DATE = f"{{%- macro strftime_now(format) -%}}{{{{- format | {_DATE_PARTS} -}}}}{{%- endmacro -%}}"


@dataclass(frozen=True)
class Request:
    """One sequence to trace: generate after `prompt_ids`, or run `prompt_ids + answer_ids` where an answer is given."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int] | None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + (self.answer_ids or [])


def encode(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    teacher_force: bool,
    chat_template: bool | None = None,
) -> list[Request]:
    """Token ids of the prompts, and of their answers under `teacher_force`; the two are joined as token lists.

    A later turn follows the answers that are forced, or those in its history. Raises InputError, naming the sample,
    when it lacks the answer to be forced, and for what `prompt_ids` refuses.
    """
    requests, said = [], {}
    for prompt in prompts:
        answer_ids = None
        if teacher_force:
            if prompt.answer is None:
                raise InputError(f"sample {prompt.sample_id} has no `answer`, which --teacher_force needs")
            prompt = after(prompt, said)
            said[prompt.sample_id] = answered(prompt, prompt.answer)
            answer_ids = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
        requests.append(Request(prompt, prompt_ids(prompt, tokenizer, chat_template), answer_ids))
    return requests


def tokens_needed(request: Request, max_new_tokens: int) -> int:
    """Tokens that go through the model at most: the last new one never does."""
    return len(request.ids) + (0 if request.answer_ids is not None else max(max_new_tokens - 1, 0))


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, chat_template: bool | None = None) -> list[int]:
    """Ids [T] of the conversation up to the target's turn: in its chat template, or with blank lines between the texts.

    A chat template writes its own special tokens, so none are added to it. Raises InputError, naming the sample, when
    it has no tokens or follows an answer that is not known yet.
    """
    if prompt.follows is not None and not prompt.history:
        raise InputError(f"sample {prompt.sample_id}: needs the answer to {prompt.follows}, which comes first")
    texts = [*prompt.history, prompt.text]
    if in_chat_template(prompt, tokenizer, chat_template):
        roles = itertools.cycle(["user", "assistant"])
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        ids = _templated(messages, prompt, tokenizer)
    else:
        ids = tokenizer("\n\n".join(texts))["input_ids"]
    if not ids:
        raise InputError(f"sample {prompt.sample_id}: its prompt has no tokens; remove the row")
    return ids


def _templated(messages: list[dict], prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """In a template that writes today's date it is always `TEMPLATE_DATE`, so that a prompt is the same every day."""
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _FIXED_DATE + template
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError as error:
        raise InputError(
            f"sample {prompt.sample_id}: the target's chat template cannot take it ({brief(error)}); "
            "give --chat_template false"
        ) from None


def in_chat_template(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, chat_template: bool | None) -> bool:
    """Whether `prompt` is put in the chat template: the key `chat_template`, or where it is not given as data set and
    tokenizer allow. Raises InputError when it is asked for and the tokenizer has none."""
    if chat_template and not tokenizer.chat_template:
        raise InputError("--chat_template true: the target's tokenizer has no chat template; leave the option out")
    return bool(prompt.chat and tokenizer.chat_template) if chat_template is None else chat_template


def answer_text(answer_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer as the next turn quotes it: without special tokens."""
    return tokenizer.decode(answer_ids, skip_special_tokens=True)


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
    """Hash of the whole tokenizer, merges and normalisers included, or of its vocabulary where it is a slow one, and of
    its chat template where it has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = sha256_json(tokenizer.get_vocab()) if backend is None else _sha256(backend.to_str())
    return sha256_json([whole, tokenizer.chat_template]) if tokenizer.chat_template else whole


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
