"""From a trace folder to a predictor folder: loop, checkpoints, export. Knows no kind by its name."""
