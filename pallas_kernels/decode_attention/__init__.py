"""Attention of one token per sequence over page indices."""
