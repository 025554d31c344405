"""Earlier occurrences of the text's ending."""
