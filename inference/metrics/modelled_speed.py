"""What a selection would gain on the three real targets, from its α and 𝓔 alone.

Where weights are read from memory, a verification pass costs what it reads: everything but the routed experts, as plain
decoding does, and 𝓔 experts a layer where plain decoding reads K.

Letters: K experts per token.
"""

# Bytes of a plain step that are no routed expert's, over all its bytes: counted from each model's configuration at the
# types of its published checkpoint (bf16; FP8; MXFP4 experts beside bf16 attention and output matrix).
FIXED_SHARE = {"Qwen3-235B-A22B": 0.34, "DeepSeek-V3.1": 0.45, "GPT-OSS-120B": 0.62}


def modelled_speedups(
    acceptance_length: float, active_experts: float, top_k: int, source_share: float = 0.0
) -> dict[str, float]:
    """Speed over plain decoding by target: α over the seconds of a step, in units of a plain step.

    `source_share`: what the footprint source takes of a plain step. Drafting and selection are left out.
    """
    return {
        target: acceptance_length / (fixed + (1 - fixed) * active_experts / top_k + source_share)
        for target, fixed in FIXED_SHARE.items()
    }
