"""The report of bits: text and JSON."""
