"""Which drafts to verify: selectors over small tensors. Knows no models, no files and no drafter.

A selector lives as long as the loop that asks it (`base`); the greedy ones differ in their score alone (`greedy`).
`config` names them all and builds one, `rule` is the choice for a single tree of plain arrays.
"""
