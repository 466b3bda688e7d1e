"""Renderers: the JSON document, the case directory and the terminal report. Nothing is computed here."""
