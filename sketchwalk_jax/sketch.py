"""Token-space and feature-space sketches (arXiv:2602.07397, section 2.2; Algorithm 1 steps 1-4).

Both sketches are linear, so running *sums in sketch space* are stored, and divided by the number of
tokens only when used.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def sketch_size(head_dim: int, sketch_dim: int | None) -> int:
    """Size `R` of a sketched vector; `head_dim` if there is no projection."""
    padded = 1 << (head_dim - 1).bit_length()
    if sketch_dim is None or sketch_dim >= padded:
        return head_dim
    return sketch_dim


def srht_matrix(head_dim: int, sketch_dim: int | None, seed: int = 0) -> np.ndarray | None:
    """Makes the subsampled randomised Hadamard transform `Ω` (section 2.2, Theorem 2.5).

    `Ω = sqrt(H'/R) · diag(signs) · Hadamard(H')/sqrt(H') · select(R columns)`, where `H'` is
    `head_dim` padded to a power of two, so that `E[(uΩ)(vΩ)ᵀ] = uvᵀ`.

    Args:
      head_dim: Size `H` of the vectors to be sketched.
      sketch_dim: Number of columns `R`; `None` for no projection.
      seed: Seed of the signs and of the choice of columns.

    Returns:
      float32 `[H, R]` on the host, or `None` if `R = H'`: the full transform is orthogonal and does
      not change inner products.

    Example:
      >>> srht_matrix(128, 64).shape
      (128, 64)
    """
    padded = 1 << (head_dim - 1).bit_length()
    if sketch_dim is None or sketch_dim >= padded:
        return None
    from scipy.linalg import hadamard  # slow to import, used only here

    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=padded)
    columns = np.sort(rng.choice(padded, size=sketch_dim, replace=False))
    mixing = hadamard(padded)[:, columns] / math.sqrt(padded)
    full = math.sqrt(padded / sketch_dim) * signs[:, None] * mixing
    return full[:head_dim].astype(np.float32)


def head_means(x: Float[Array, "B T Heads H"]) -> Float[Array, "B T 1 H"]:
    """Means over heads (Algorithm 1 step 1), float32."""
    return jnp.mean(x.astype(jnp.float32), axis=2, keepdims=True)


def project(x: Float[Array, "*lead H"], omega: np.ndarray | None) -> Float[Array, "*lead R"]:
    """Computes `x Ω`, float32 at full precision; returns `x` if there is no projection."""
    if omega is None:
        return x
    return jnp.matmul(x, jnp.asarray(omega), precision=jax.lax.Precision.HIGHEST)


def block_sums(
    x: Float[Array, "B T C H"], valid: Bool[Array, "B T"], block_size: int
) -> Float[Array, "B I C H"]:
    """Sums over the valid tokens of each block (`T` is a multiple of `block_size`)."""
    batch, tokens, channels, head_dim = x.shape
    x = jnp.where(valid[:, :, None, None], x, 0.0)
    return jnp.sum(x.reshape(batch, tokens // block_size, block_size, channels, head_dim), axis=2)


def block_token_counts(
    lengths: Int[Array, "B"], num_blocks: int, block_size: int
) -> Int[Array, "B J"]:
    """Number of tokens in each block of sequences of the given lengths."""
    starts = jnp.arange(num_blocks, dtype=jnp.int32) * block_size
    return jnp.clip(lengths[:, None] - starts[None, :], 0, block_size)


def block_means(
    sums: Float[Array, "B J C R"], lengths: Int[Array, "B"], block_size: int
) -> Float[Array, "B J C R"]:
    """Means over the tokens of each block; empty blocks are zero."""
    counts = block_token_counts(lengths, sums.shape[1], block_size)
    return sums / jnp.maximum(counts, 1).astype(jnp.float32)[:, :, None, None]


def block_scores(
    query: Float[Array, "B I C R"], key: Float[Array, "B J C R"], head_dim: int
) -> Float[Array, "B I J"]:
    """Computes `A = Q̃ K̃ᵀ / sqrt(H)` (Algorithm 1 step 5), summed over head groups; no mask."""
    scores = jnp.einsum("bicr,bjcr->bij", query, key, precision=jax.lax.Precision.HIGHEST)
    return scores * (1.0 / math.sqrt(head_dim))
