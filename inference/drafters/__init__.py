"""Drafters: what proposes the tree. One small interface (`base.Drafter`), one module per kind."""
