"""Checkpoints, recorded batches and raw records, read without executing anything that a file holds."""
