"""Floating-point formats, exact rounding and steps, in plain Python and NumPy. Knows nothing of torch."""
