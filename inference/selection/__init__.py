"""Which drafts to verify: pure functions over small tensors. Knows no models."""
