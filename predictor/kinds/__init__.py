"""Models and tables that say which experts a token will use, a folder each. Knows nothing of training loops."""
