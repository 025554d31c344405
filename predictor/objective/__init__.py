"""Loss, overlap and the other metrics of predicted experts: pure functions. Knows no models and no files."""
