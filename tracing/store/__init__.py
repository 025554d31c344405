"""Trace folders on disk: format, commits, checks, exports. Knows nothing of models and engines."""
