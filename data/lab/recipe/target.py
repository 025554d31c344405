"""The lab target itself: its tokenizer, its configuration, and that of the dense model it is measured against."""

from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from ecospec.data.lab.recipe.corpus import Document

END = "<|end|>"
VOCABULARY = 4096
CONTEXT = 2048
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def moe_config() -> Qwen3MoeConfig:
    """8 MoE layers of 64 experts, 8 per token."""
    return Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True)


def dense_config() -> Qwen3Config:
    """The same model with one MLP as wide as the 8 experts that a token uses (equal active size)."""
    return Qwen3Config(**SHAPE, intermediate_size=8 * 32)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose digits stand alone and whose every text begins with `<|end|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def pack(documents: list[Document], tokenizer: PreTrainedTokenizerFast, tokens: int, seed: int) -> np.ndarray:
    """At least `tokens` token ids: the documents reshuffled each epoch, each preceded by `<|end|>`."""
    encoded = [
        np.array(e.ids, np.uint16) for e in tokenizer.backend_tokenizer.encode_batch([d.text for d in documents])
    ]
    generator, parts, total = np.random.default_rng(seed), [], 0
    while total <= tokens:
        parts += [encoded[i] for i in generator.permutation(len(encoded))]
        total = sum(map(len, parts))
    return np.concatenate(parts)
