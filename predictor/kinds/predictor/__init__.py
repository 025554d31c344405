"""The predictor of the paper: a small decoder on the target's own embeddings."""
