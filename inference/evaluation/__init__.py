"""Methods side by side on the same prompts, and the run folder. Knows no decoding step."""
