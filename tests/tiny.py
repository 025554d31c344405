"""Tiny random MoE models of several families, and a target folder that the commands can run on.

Their weights are drawn wide, so that neither routing nor the choice of the next token is ever a near tie.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

VOCABULARY = 264  # 256 bytes, the end token, and ids that no text uses
END, END_ID = "<|end|>", 256
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "bos_token_id": END_ID,
    "eos_token_id": END_ID,
    "pad_token_id": END_ID,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 16, "head_dim": 8, "sliding_window": 8},
    "deepseek_v3": {**GROUPED, **LATENT},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": 8, "intermediate_size": 16},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "glm4_moe": {**GROUPED, "head_dim": 8},
}


def tiny_config(family: str, **overrides: object) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family], **overrides})


def tiny_model(family: str, seed: int = 0, **overrides: object) -> nn.Module:
    """A float32 model of `family` with hidden size 32, 8 experts and top-2 unless `overrides` say otherwise."""
    return random_model(tiny_config(family, **overrides), seed, spread=0.3)


@torch.no_grad()
def random_model(config: PreTrainedConfig, seed: int, spread: float) -> nn.Module:
    """A float32 model whose matrices are drawn with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, spread, generator=generator)
        elif "norm" not in name:
            parameter.normal_(0, 0.1, generator=generator)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0, 0.05, generator=generator)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate([*alphabet, END])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def tiny_target_folder(path: Path, family: str = "qwen3_moe", seed: int = 0, **overrides: object) -> Path:
    """Save a tiny model and its tokenizer to `path`, for `--target path`."""
    tiny_model(family, seed, **overrides).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def brute_force_experts(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """int64 [T, L, K], ascending: each token's ids read from the routers' own output, one growing prefix a forward.

    The slow reference for everything that records routing: no cache, no padding, no batch, no experts module.
    """
    rows = []
    for length in range(1, len(ids) + 1):
        seen: dict[int, torch.Tensor] = {}
        handles = [
            module.register_forward_hook(_keep_last_row(seen, layer)) for layer, module in enumerate(_routers(model))
        ]
        with torch.no_grad():
            model(torch.tensor([ids[:length]]), use_cache=False)
        for handle in handles:
            handle.remove()
        rows.append(torch.stack([seen[layer] for layer in sorted(seen)]))
    return torch.stack(rows).sort(-1).values


def _routers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]


def _keep_last_row(seen: dict[int, torch.Tensor], layer: int) -> object:
    def hook(_module: nn.Module, _args: tuple, output: tuple) -> None:
        seen[layer] = output[2][-1]

    return hook
