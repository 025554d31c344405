"""EAGLE-3 heads of every known writer."""
