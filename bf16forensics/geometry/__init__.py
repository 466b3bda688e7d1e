"""Which query may see which key, and what is done to a score before the softmax."""
