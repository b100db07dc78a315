"""Exact block-sparse and dense attention, and the share of attention that each block gets."""

from sketchwalk_jax.attention.api import (
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    num_query_blocks,
)

__all__ = ["block_sparse_attention", "block_sparse_decode", "dense_attention", "num_query_blocks"]
