"""Block means, the Hadamard sketch and the block scores (Algorithm 1, steps 1 to 5), in float32."""

import numpy as np
from jaxtyping import Array, Float

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

AnyArray = Array | np.ndarray


def hadamard(size: int) -> np.ndarray:
    """Returns the Hadamard matrix of a power of two in natural (Sylvester) order.

    `H_1 = [1]`, `H_2n = [[H_n, H_n], [H_n, -H_n]]`: entries ±1, rows orthogonal.

    Example:
      >>> hadamard(2).tolist()
      [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def subsampled_hadamard(head_dim: int, num_columns: int, seed: int) -> np.ndarray:
    """Returns the first `head_dim` rows of `Ω`, for any number of columns up to `H'`.

    `Ω = sqrt(H'/R) · diag(signs) · Hadamard(H')/sqrt(H') · select(R columns)`, where `H'` is
    `head_dim` rounded up to a power of two and the columns are drawn without replacement
    (section 2.2). `E[(u Ω)(v Ω)ᵀ] = u vᵀ` over seeds; with `R = H'` it holds for every seed.

    Args:
      head_dim: `H`, features of a query or key vector.
      num_columns: `R`, at most `H'`.
      seed: Seed of the draw: the signs first, then the sorted columns.

    Returns:
      `[H, R]` float64.

    Example:
      >>> omega = subsampled_hadamard(4, 4, seed=0)
      >>> bool(np.allclose(omega @ omega.T, np.eye(4)))
      True
    """
    padded = 1 << (head_dim - 1).bit_length()
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=padded)
    columns = np.sort(rng.choice(padded, size=num_columns, replace=False))
    orthonormal = hadamard(padded) / np.sqrt(padded)
    omega = np.sqrt(padded / num_columns) * (signs[:, None] * orthonormal)[:, columns]
    return omega[:head_dim]


def srht_matrix(head_dim: int, sketch_dim: int | None, seed: int) -> np.ndarray:
    """Returns the projection that the method applies to block means.

    The effective dimension is `R = min(sketch_dim, H')`. Where it equals `H'`, or `sketch_dim`
    is None, no projection is made and the identity is returned.

    Args:
      head_dim: `H`.
      sketch_dim: Wanted columns, or None.
      seed: Seed of the draw.

    Returns:
      `[H, R]` (or the `[H, H]` identity) float32.

    Example:
      >>> srht_matrix(128, 64, seed=0).shape
      (128, 64)
    """
    padded = 1 << (head_dim - 1).bit_length()
    if sketch_dim is None or sketch_dim >= padded:
        return np.eye(head_dim, dtype=np.float32)
    return subsampled_hadamard(head_dim, sketch_dim, seed).astype(np.float32)


def block_means(x: Float[AnyArray, "T X H"], block_size: int) -> np.ndarray:
    """Averages the tokens of each block; a partly filled last block divides by its real count.

    Args:
      x: Queries or keys of one sequence, after RoPE, in any float type.
      block_size: Tokens per block.

    Returns:
      `[J, X, H]` float32 with `J = ceil(T / block_size)`.

    Example:
      >>> block_means(np.arange(5.0).reshape(5, 1, 1), 4).ravel().tolist()
      [1.5, 4.0]
    """
    x = np.asarray(x, np.float32)
    starts = range(0, len(x), block_size)
    return np.stack([x[start : start + block_size].mean(axis=0) for start in starts])


def block_scores(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    config: SketchWalkConfig,
    *,
    is_decode: bool = False,
) -> np.ndarray:
    """Scores every causal pair of blocks: `A[i, j] = (q̄[i] Ω)(k̄[j] Ω)ᵀ / sqrt(H)`, `j <= i`.

    `head_combination="mean"` averages the heads before scoring (Algorithm 1, step 1), `"sum"`
    adds up the scores that each query head has with its key head.

    Args:
      query: All queries of one sequence up to now, after RoPE.
      key: All keys of one sequence up to now, after RoPE.
      config: What is computed.
      is_decode: Replaces the last block's query mean by the last token's query
        (Algorithm 2, step 3).

    Returns:
      `[J, J]` float32, zero above the diagonal.

    Example:
      >>> ones = np.ones((64, 1, 4), np.float32)
      >>> block_scores(ones, ones, SketchWalkConfig.paper()).tolist()
      [[2.0]]
    """
    num_heads, head_dim = query.shape[1:]
    query_means = block_means(query, config.block_size)
    key_means = block_means(key, config.block_size)
    if is_decode:
        query_means[-1] = np.asarray(query[-1], np.float32)
    if config.head_combination == "mean":
        query_means = query_means.mean(axis=1, keepdims=True)
        key_means = key_means.mean(axis=1, keepdims=True)
    else:
        key_means = key_means.repeat(num_heads // key.shape[1], axis=1)
    omega = srht_matrix(head_dim, config.sketch_dim, config.seed)
    scores = np.einsum("inr,jnr->ij", query_means @ omega, key_means @ omega)
    return np.tril(scores / np.float32(np.sqrt(head_dim)))
