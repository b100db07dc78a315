"""Exact attention: over block lists, over everything, and how much of it falls on each block."""

from sketchwalk_jax.attention.api import (
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    num_query_blocks,
)

__all__ = ["block_sparse_attention", "block_sparse_decode", "dense_attention", "num_query_blocks"]
