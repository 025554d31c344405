"""The decoding loop: draft, predict, select, verify, accept. Knows no files and no configuration."""
