"""The experts of the last token that went through the target."""
