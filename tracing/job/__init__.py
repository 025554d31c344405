"""Tracing itself: what is to be run, by which engine, and what is believed of its answers. Knows no statistics."""
