"""The checks of doctor."""
