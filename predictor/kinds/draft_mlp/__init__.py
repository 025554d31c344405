"""An MLP on what a draft head is fed at a node."""
