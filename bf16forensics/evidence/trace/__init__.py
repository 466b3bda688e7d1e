"""From one row of one head to its additions: contributions, running sums under an accumulator, jumps."""
