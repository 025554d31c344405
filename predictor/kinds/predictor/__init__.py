"""The trained expert predictor Π_θ: a small decoder that reads the text."""
