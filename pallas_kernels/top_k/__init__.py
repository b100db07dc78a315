"""Page indices: the pages with the best scores."""
