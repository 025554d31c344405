"""A trained MLP on a token and what a draft head reads at its node."""
