"""Drafters: what proposes the tree. A kind is a folder here, with one object `KIND` in its `kind.py`; no list names
them. Loads no torch. Knows nothing of selection and of the decoding loop.
"""
