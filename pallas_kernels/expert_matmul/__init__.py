"""Products of prompt rows, sorted by expert, with the experts' stacked weights."""
