"""What the model card says about the lab target: language modelling, routing and looping, measured on unseen text.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ecospec.data.lab.recipe.corpus import Document
from ecospec.tracing.target.recorder import RoutingRecorder

WINDOW = 512  # tokens per evaluation row
GRAM = 8


def held_out_tokens(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, int]:
    """Token ids [T] of the held-out documents, each after `<|end|>`, and how many bytes of text they stand for."""
    texts = [document.text for document in documents if document.held_out]
    ids = [token for text in texts for token in tokenizer(text).input_ids]
    return torch.tensor(ids), sum(len(text.encode()) for text in texts)


@torch.inference_mode()
def bits_per_byte(model: nn.Module, ids_T: Tensor, num_bytes: int) -> float:
    """Cross-entropy of the text in bits per byte; rows of `WINDOW` tokens, each predicted from its own row alone."""
    rows = ids_T[: len(ids_T) // WINDOW * WINDOW].view(-1, WINDOW)
    nats = count = 0.0
    for batch in rows.split(16):
        logits = model(input_ids=batch).logits[:, :-1].float()
        nats += float(nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        count += batch[:, 1:].numel()
    return nats / count * len(ids_T) / num_bytes / math.log(2)


@torch.inference_mode()
def route(model: nn.Module, ids_T: Tensor, tokens: int = 65536) -> np.ndarray:
    """Expert ids [rows, WINDOW, L, K] of the first `tokens` tokens of a text."""
    rows = ids_T[: min(tokens, len(ids_T)) // WINDOW * WINDOW].view(-1, WINDOW)
    with RoutingRecorder(model) as recorder:
        for batch in rows.split(16):
            model(input_ids=batch, logits_to_keep=1)
        experts = recorder.take(rows.numel())
    return experts.view(len(rows), WINDOW, *experts.shape[1:]).numpy()


def first_repeat(ids: Sequence[int], gram: int = GRAM) -> int:
    """Number of tokens before the first one whose closing n-gram occurred earlier in the same text; all if none."""
    seen = set()
    for end in range(gram, len(ids) + 1):
        closing = tuple(ids[end - gram : end])
        if closing in seen:
            return end - 1
        seen.add(closing)
    return len(ids)


def looping(answers: Iterable[Sequence[int]], gram: int = GRAM) -> float:
    """Share of tokens whose closing n-gram occurred earlier in the same answer."""
    repeated = total = 0
    for ids in answers:
        seen = set()
        for end in range(gram, len(ids) + 1):
            closing = tuple(ids[end - gram : end])
            repeated += closing in seen
            seen.add(closing)
        total += len(ids)
    return repeated / total if total else 0.0
