"""Where an attention implementation rounds, as data: presets, derived recipes, files."""
