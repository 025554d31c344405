"""The seam between decoding and the model that verifies: caches, masks, features. Knows no drafts' meaning."""
