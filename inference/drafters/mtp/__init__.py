"""The multi-token-prediction layer in the target's own checkpoint."""
