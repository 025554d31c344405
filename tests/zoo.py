"""A tiny random model of every mixture-of-experts family of Transformers 5.24 that has a causal language model.

Four layers, hidden size 32, 8 experts, top-2, window 8 where a family slides. Weights are drawn wide, so that neither
routing nor the choice of the next token is ever a near tie, and no token ends a text.
"""

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.tiny import VOCABULARY, random_model

LAYERS = 4
WINDOW = 8
INDEXED = 64  # context up to which sparse attention sees everything
COMMON = {  # every spelling of every size; a family takes those that it has
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "output_router_logits": False,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
CHOOSING = {**LATENT, "index_topk": INDEXED, "index_n_heads": 2, "index_head_dim": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
TREE_CAPABLE = {
    "afmoe": {**SLIDING, "num_dense_layers": 1},
    "aria_text": {},
    "axk1": {**LATENT, **GROUPS},
    "axk2": CHOOSING,
    "beam": {**SLIDING, **GROUPS, **SPARSE},
    "cohere2_moe": {**SLIDING, "logit_scale": 1.0},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 512,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, **GROUPS, "num_mtp_layers": 0},
    "deepseek_v32": {**CHOOSING, **GROUPS},
    "dots1": {**SLIDING, **GROUPS},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "exaone_moe": {**SLIDING, **GROUPS},
    "flex_olmo": {},
    "flint": SLIDING,
    "gemma4_text": {
        **SLIDING,
        "enable_moe_block": True,
        "tie_word_embeddings": False,  # else a token is its own likeliest successor
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
    },
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": CHOOSING,
    "gpt_oss": SLIDING,
    "granitemoe": {},
    "granitemoe_swa": SLIDING,
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": CHOOSING,
    "kolibri1": SLIDING,
    "laguna": SLIDING,
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mellum": SLIDING,
    "mimo_v2_flash": SLIDING,
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl_text": {},
    "mixtral": {"sliding_window": WINDOW},
    "olmoe": {},
    "phimoe": {"sliding_window": WINDOW},
    "qwen2_moe": {**SLIDING, "use_sliding_window": True},
    "qwen3_moe": {},
    "solar_open": {},
}
STATEFUL = {
    "bailing_hybrid": {**LATENT, "num_expert_group": 4, "topk_group": 2, "layer_group_size": 2},
    "deepseek_v4": {},
    "granitemoehybrid": {**LINEAR, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "kimi_linear": {**LATENT, **LINEAR, "num_expert_group": 1, "topk_group": 1},
    "lara_mini": {},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8},
        **{"ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16, "chunk_size": 8},
    },
    "qwen3_5_moe_text": {**DELTA, **LINEAR},
    "qwen3_next": {**DELTA, **LINEAR},
    "zaya": {"num_experts_per_tok": 1},
}
OTHERS = {
    "doge": {"is_moe": True, "num_experts": 16},
    "jetmoe": {"kv_channels": 8},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"interleave_moe_layer_step": 2, "attention_chunk_size": 16},
    "minimax": {"block_size": 4},
}
REFUSED = {  # a part of the reason
    **dict.fromkeys(STATEFUL, "recurrent or compressed state"),
    "doge": "product-key memories",
    "jetmoe": "its experts take sorted lists",
    "lfm2_moe": "layers of type conv",
    "llama4_text": "its experts run on every token",
    "minimax": "layers of type linear_attention",
}
OWN = {**TREE_CAPABLE, **STATEFUL, **OTHERS}  # what each family needs besides the common sizes


def zoo_config(family: str, **overrides: object) -> PreTrainedConfig:
    """A small configuration of `family`, whichever names it has for its sizes."""
    kind = CONFIG_MAPPING[family]
    aliases = getattr(kind, "attribute_map", None) or {}
    known = set(kind().to_dict()) | set(aliases)
    common = {name: value for name, value in COMMON.items() if name in known and aliases.get(name) not in COMMON}
    return kind(**{**common, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, **OWN[family], **overrides})


def zoo_model(family: str, seed: int = 0, **overrides: object) -> nn.Module:
    """A float32 model of `family`; `overrides` are options of its configuration."""
    model = random_model(zoo_config(family, **overrides), seed, spread=0.25)
    model.generation_config.eos_token_id = None
    return model
