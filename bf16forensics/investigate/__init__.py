"""The experiments: localize and what follows it."""
