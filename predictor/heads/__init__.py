"""Fitting EAGLE-3 heads on a target's own text, for the lab. Knows nothing of predictors."""
