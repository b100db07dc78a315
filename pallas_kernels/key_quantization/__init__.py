"""Keys in four bits, and a token's key and value written to their caches."""
