"""Drafters: what proposes the tree. One small interface (`base.Drafter`), one folder per kind."""
