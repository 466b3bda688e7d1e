"""Verdicts: what the evidence allows to be said, by stated thresholds, and what would refute it."""
