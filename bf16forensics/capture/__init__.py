"""Attention calls of a running model, or of a file, as records."""
