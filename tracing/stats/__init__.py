"""What traces say of a target: load, unions, reuse, agreement. Reads trace folders only, never a model."""
