"""The MoE target: its name and weights, its routers, its prompts as ids. Knows nothing of traces or decoding."""
