"""The front of all commands: keys, short forms, YAML; beside it the shipped configurations. Loads no torch."""
