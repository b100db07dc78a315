"""Quantization of keys to four bits, and cache writes of a token's key and value."""
