"""Selection of the blocks or pages with the best scores."""
