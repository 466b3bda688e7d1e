"""From a record and its dual pass to scalars, with their statistics."""
