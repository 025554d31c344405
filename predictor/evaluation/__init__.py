"""What predictors are worth on traces. Trains only to see how far a predictor carries."""
