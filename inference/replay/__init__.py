"""Trees recorded once, then any selection without the target."""
