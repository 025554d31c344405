"""Speculative decoding that counts the experts a Mixture-of-Experts target must read.

The rooms are top-level folders of the repository, linked from here. This package itself holds the foundation that all
of them stand on (errors, files, progress, lazy names, reports) and knows nothing of models, traces or decoding.
"""
