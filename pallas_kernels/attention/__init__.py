"""Attention of query blocks over page indices."""
