"""One sparse layer of each algorithm in plain JAX: the specification of this package.

`recommended_layer` is the default algorithm, `paper_layer` the algorithm as the paper prints it
(arXiv:2602.07397, Algorithms 1 and 2). Policies and kernels are tested against this file. It shares
no code with them, and is written to be read, not to be fast.

A layer takes queries, keys and values of all tokens of one sequence, after rotary embedding, and
the walk that the previous sparse layer returned (`None` in the first one). It returns the output,
the next walk, and a mask of the pages that each row keeps. `jax.vmap` adds a batch. With
`is_token`, a layer is one step of decode: it computes only the last token's output, from its query.

Axes: `T` tokens, `N` query heads, `K` key/value heads (query head `n` reads key/value head
`n // (N / K)`), `H` channels of a head, `C` channels that scores use, `I` rows, `J` blocks, `S`
tokens of a block, `P` pages, `R` queries that represent a row. A *row* is a block of queries that
share a list of pages; in decode it is the new token. No row depends on later blocks or on the
length of the prompt, so a prompt read in pieces of whole blocks selects the same pages.
"""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_einsum = partial(jnp.einsum, precision="highest")  # in float32, also on tensor cores


# The default algorithm.


def recommended_layer(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    walk: Float[Array, "I P"] | None = None,
    *,
    is_token: bool = False,
    density: float = 0.2,  # share of all causal pairs
    block_size: int = 64,  # queries of a row; keys that share a zero point
    page_size: int = 16,  # keys of a page
    representatives: int = 8,  # queries that represent a row
    early_representatives: tuple[tuple[int, int], ...] = ((8192, 32),),  # 32 before token 8192
    exponent: int = 8,
    decay: float = 0.4,
    sink_tokens: int = 16,  # first keys, which every row keeps
    local_tokens: int = 32,  # keys before its own block, which every row keeps
    min_tokens: tuple[int, int] = (1280, 2048),  # of a prompt's row, and of a token, at least
) -> tuple[Float[Array, "Q N H"], Float[Array, "I P"], Bool[Array, "I P"]]:
    """Attends to the pages with the best scores, which the walk carries from layer to layer.

        walk_k = max(page_scores_k, decay · walk_{k-1})

    Row `i` keeps `page_budget` pages, where a row is `w` pages wide: always the first and the last
    ones, then the best by `walk_k[i]`. A decoded token is a row of one page (`w = 1`), represented
    by its own query. It keeps the last `block_size` keys instead of `local_tokens`.
    """
    num_tokens, _, head_dim = query.shape
    slow, pages = slow_channels(head_dim), block_size // page_size  # of a block
    zero_point, offsets = quantize_keys(_blocks(key[..., slow], block_size, fill=jnp.nan))
    # Each row's place, width in pages, last pages always kept, and number of representatives.
    if is_token:
        row, width, local = np.array([(num_tokens - 1) // page_size]), 1, pages
        reps, number = query[-1:, None][..., slow], np.ones(1, int)
    else:
        row, width, local = np.arange(len(offsets)), pages, pages + -(-local_tokens // page_size)
        early = [np.where(row * block_size < end, n, 0) for end, n in early_representatives]
        number = np.minimum(block_size, np.max([0 * row + representatives, *early], axis=0))
        find = partial(representative_queries, count=int(number.max()))  # of one row and head
        reps = jax.vmap(jax.vmap(find, 1, 1))(_blocks(query[..., slow], block_size, fill=jnp.nan))
    last, sink = width * (row + 1) - 1, -(-sink_tokens // page_size)
    logits = page_logits(reps, zero_point, offsets, num_tokens, page_size) / math.sqrt(head_dim)
    scores = page_scores(logits, last, number, exponent)
    walk = scores if walk is None else jnp.maximum(scores, decay * walk)
    least = max(-(-min_tokens[is_token] // page_size), sink + local)
    budget = page_budget(row, width, density, least)
    kept = select_pages(walk, last, budget, sink, local)
    query = query[-1:] if is_token else query
    return attend(query, key, value, kept, block_size, page_size), walk, kept


def slow_channels(head_dim: int) -> Int[np.ndarray, "C"]:
    """Returns the half of the channels that rotary embedding (`d`, `d + H/2`) rotates slowest."""
    return np.flatnonzero(np.arange(head_dim) % (head_dim // 2) >= head_dim // 4)


def representative_queries(query: Float[Array, "S C"], count: int) -> Float[Array, "R C"]:
    """Takes the mean of one head's queries, then repeatedly the query farthest from all taken.

    Queries that are not finite are ignored. If no other is left, the mean is taken again.
    """
    left = jnp.isfinite(query).all(axis=1)
    x = jnp.where(left[:, None], query.astype(jnp.float32), 0.0)
    mean = x.sum(axis=0) / jnp.maximum(left.sum(dtype=jnp.float32), 1.0)
    taken, distance = [mean], jnp.full(len(x), jnp.inf)  # squared, to the nearest one taken
    for _ in range(count - 1):
        distance = jnp.minimum(distance, ((x - taken[-1][None]) ** 2).sum(axis=1))
        farthest = jnp.argmax(jnp.where(left, distance, -1.0))
        taken.append(jnp.where(left[farthest], x[farthest], mean))
        left = left.at[farthest].set(False)
    return jnp.stack(taken).astype(query.dtype)


def quantize_keys(
    key: Float[Array, "J S K C"],
) -> tuple[Float[Array, "J K C"], Float[Array, "J S K C"]]:
    """Zero points of blocks in bfloat16, and keys' offsets from them in 4 bits, per channel.

        zero_point = (max_s k_s + min_s k_s) / 2
        scale      = smallest power of two, 2^-9 to 2^6, not below max_s abs(k_s - zero_point) / 7
        offset_s   = scale · round((k_s - zero_point) / scale), the integer from -7 to 7

    A key that is not finite has the offset 0. A block of only such keys has the zero point NaN.
    """
    x, is_finite = key.astype(jnp.float32), jnp.isfinite(key).all(axis=-1, keepdims=True)
    low = jnp.where(is_finite, x, jnp.inf).min(axis=1, keepdims=True)
    high = jnp.where(is_finite, x, -jnp.inf).max(axis=1, keepdims=True)
    zero_point = jax.lax.reduce_precision(0.5 * low + 0.5 * high, exponent_bits=8, mantissa_bits=7)
    distance = jnp.where(is_finite, x - zero_point, 0.0)
    scale = _power_of_two_above(abs(distance).max(axis=1, keepdims=True) / 7.0)
    scale = jnp.clip(scale, 2.0**-9, 2.0**6)
    return zero_point[:, 0], scale * jnp.clip(jnp.round(distance / scale), -7.0, 7.0)


def round_query(query: Float[Array, "*axes C"]) -> Float[Array, "*axes C"]:
    """Rounds a query to float8_e4m3fn times the least power of two that leaves at most 448."""
    x = query.astype(jnp.float32)
    scale = _power_of_two_above(abs(x).max(axis=-1, keepdims=True) / 448.0)
    # Without the barrier, XLA may drop a conversion to fewer bits and back.
    rounded = jax.lax.optimization_barrier((x / scale).astype(jnp.float8_e4m3fn))
    return scale * rounded.astype(jnp.float32)


def page_logits(
    reps: Float[Array, "I R N C"],
    zero_point: Float[Array, "J K C"],
    offsets: Float[Array, "J S K C"],
    num_tokens: int,
    page_size: int,
) -> Float[Array, "I R N P"]:
    """Computes `q · zero_point + max_s round_query(q) · offset_s` over each page's keys `s`."""
    group = reps.shape[2] // zero_point.shape[1]
    zero_point, offsets = (jnp.repeat(x, group, axis=-2) for x in (zero_point, offsets))
    products = _einsum("irnc,jsnc->irnjs", round_query(reps), offsets)
    is_key = np.arange(offsets.shape[0] * offsets.shape[1]).reshape(offsets.shape[:2]) < num_tokens
    is_seen = is_key[None, None, None] & jnp.isfinite(products)
    products = jnp.where(is_seen, products, -jnp.inf)
    largest = products.reshape(*products.shape[:-1], -1, page_size).max(axis=-1)
    logits = _einsum("irnc,jnc->irnj", reps.astype(jnp.float32), zero_point)[..., None] + largest
    return logits.reshape(*reps.shape[:3], -1)


def page_scores(
    logits: Float[Array, "I R N P"],
    last: Int[np.ndarray, "I"],
    number: Int[np.ndarray, "I"],
    exponent: int,
) -> Float[Array, "I P"]:
    """Page scores: a norm over heads and representatives of their softmax over pages.

        share[i, r, n, p] = softmax of logits[i, r, n] over the pages p up to last[i]
        score[i, p] = (sum over n and r < number[i] of share[i, r, n, p]^exponent)^(1 / exponent)

    Pages with a logit of magnitude 1e29 or more, or NaN, are masked.
    """
    is_before = (np.arange(logits.shape[3]) <= last[:, None])[:, None, None, :]
    is_used = (np.arange(logits.shape[1]) < number[:, None])[:, :, None, None]
    is_seen = is_before & is_used & (abs(logits) < 1e29)
    shares = jax.nn.softmax(jnp.where(is_seen, logits, -1e30), axis=-1)
    powers = jnp.where(is_seen, shares, 0.0) ** exponent
    return powers.sum(axis=(1, 2)) ** (1.0 / exponent)


def page_budget(
    row: Int[np.ndarray, "I"], width: int, density: float, least: int
) -> Int[np.ndarray, "I"]:
    """Computes `min(w · (i + 1), max(least, round(w · (density · (i + 1/2) + 1/2))))`, exactly.

    `density` is the decimal that it prints as. A tie rounds to the even integer.
    """
    share, half = Fraction(repr(density)), Fraction(1, 2)
    wanted = [round(width * (share * (int(i) + half) + half)) for i in row]
    return np.minimum(width * (row + 1), np.maximum(wanted, least))


# The algorithm as printed.


def paper_layer(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    walk: Float[Array, "J J"] | None = None,
    *,
    is_token: bool = False,
    density: float = 0.2,  # share of the blocks of each row
    block_size: int = 64,  # tokens of a block, which is a row of queries and a page of keys
    sketch_dim: int | None = 64,  # columns of the Hadamard sketch
    seed: int = 0,  # of the sketch
    exponent: int = 8,
    sink_blocks: int = 1,  # first blocks, which every row keeps
    local_blocks: int = 1,  # last blocks up to its own, which every row keeps
) -> tuple[Float[Array, "Q N H"], Float[Array, "J J"], Bool[Array, "I J"]]:
    """Attends to the best blocks of the walk (Algorithm 1; in decode Algorithm 2).

        A   = block_scores
        W_k = A_k^exponent, element by element
        R_0 = W_0,   R_k = R_{k-1} W_k                                (equation 1)

    Row `i` keeps `max(sink_blocks + local_blocks, ceil(density · (i + 1)))` blocks: always the
    first and the last ones, then the best by `R_k[i]`, or by `A[i]` if that row is zero. In decode
    only the last row selects; the rows before it come from the prompt.
    """
    scores = block_scores(query, key, block_size, sketch_dim, seed, is_token=is_token)
    walk = walk_step(walk, scores, exponent)
    ranking = jnp.where((walk > 0).any(axis=1, keepdims=True), walk, scores)
    budget = block_budget(len(walk), density, sink_blocks + local_blocks)
    kept = select_pages(ranking, np.arange(len(walk)), budget, sink_blocks, local_blocks)
    query, kept = (query[-1:], kept[-1:]) if is_token else (query, kept)
    return attend(query, key, value, kept, block_size, block_size), walk, kept


def block_scores(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"],
    block_size: int = 64,
    sketch_dim: int | None = 64,
    seed: int = 0,
    *,
    is_token: bool = False,
) -> Float[Array, "J J"]:
    """Computes `A[i, j] = (q̄_i Ω) · (k̄_j Ω) / sqrt(H)` for `j <= i`, else 0 (steps 1 to 5).

    `q̄_i` and `k̄_j` are means over heads and over the tokens of a block. In decode the last token's
    query replaces its block's mean (Algorithm 2, step 3).
    """
    starts = np.arange(0, len(query), block_size)
    sizes = np.minimum(len(query) - starts, block_size).astype(np.float32)[:, None]
    blocks = (_blocks(x.astype(jnp.float32), block_size, fill=0.0) for x in (query, key))
    query_mean, key_mean = (x.mean(axis=2).sum(axis=1) / sizes for x in blocks)
    if is_token:
        query_mean = query_mean.at[-1].set(query[-1].mean(axis=0, dtype=jnp.float32))
    omega = srht_matrix(query.shape[-1], sketch_dim, seed)
    sketches = (_einsum("jh,hr->jr", x, omega) for x in (query_mean, key_mean))
    return jnp.tril(_einsum("ir,jr->ij", *sketches)) / math.sqrt(query.shape[-1])


def srht_matrix(head_dim: int, sketch_dim: int | None, seed: int) -> Float[np.ndarray, "H R"]:
    """Makes `Ω`, a subsampled randomised Hadamard transform: `E[(uΩ)(vΩ)ᵀ] = uvᵀ` (section 2.2).

    `sqrt(H'/R) · diag(signs) · Hadamard(H')/sqrt(H') · select(R columns)`, where `H'` is the
    smallest power of two not below `H`; the identity if `R` is `None` or not below `H'`.
    """
    padded = 1 << (head_dim - 1).bit_length()
    if sketch_dim is None or sketch_dim >= padded:
        return np.eye(head_dim, dtype=np.float32)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=padded)
    columns = np.sort(rng.choice(padded, size=sketch_dim, replace=False))
    hadamard = (-1.0) ** np.bitwise_count(np.arange(padded)[:, None] & columns)
    return (signs[:, None] * hadamard / math.sqrt(sketch_dim))[:head_dim].astype(np.float32)


def walk_step(
    walk: Float[Array, "J J"] | None, scores: Float[Array, "J J"], exponent: int = 8
) -> Float[Array, "J J"]:
    """Computes `R_k` from `R_{k-1}` and `A_k`, with rows scaled to a largest entry of 1.

    Scaling `W_k` or a row of `R_k` changes no selection, but without it the powers would exceed
    float32. Scores that are not finite count as 0.
    """
    weights = jnp.where(jnp.isfinite(scores), scores, 0.0)
    weights = _largest_to_one(weights, axis=None) ** exponent
    walk = weights if walk is None else _einsum("im,mj->ij", walk, weights)
    return _largest_to_one(walk, axis=1)


def block_budget(num_rows: int, density: float, least: int) -> Int[np.ndarray, "J"]:
    """Computes `min(i + 1, max(least, ceil(density · (i + 1))))`, exactly, as `page_budget`."""
    share = Fraction(repr(density))
    return np.array([min(n, max(least, math.ceil(share * n))) for n in range(1, num_rows + 1)])


# Both algorithms.


def select_pages(
    walk: Float[Array, "I P"],
    last: Int[np.ndarray, "I"],
    budget: Int[np.ndarray, "I"],
    sink: int,
    local: int,
) -> Bool[Array, "I P"]:
    """Selects `budget` pages for each row, among the pages up to its `last` one.

    The first `sink` pages and the `local` ones up to `last` come first, then those with the largest
    entries of `walk`; ties go to the lower page. Entries that are not finite come last.
    """
    page, last = np.arange(walk.shape[1])[None], last[:, None]
    rank = jnp.where(jnp.isfinite(walk), -walk, jnp.inf)
    rank = jnp.where((page < sink) | (page > last - local), -jnp.inf, rank)
    order = jnp.argsort(jnp.where(page <= last, rank, jnp.inf), axis=1, stable=True)
    return (jnp.argsort(order, axis=1) < budget[:, None]) & (page <= last)


def attend(
    query: Float[Array, "Q N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    kept: Bool[Array, "I P"],
    block_size: int,
    page_size: int,
) -> Float[Array, "Q N H"]:
    """`softmax(q · k_s / sqrt(H)) v_s` per head, over the kept keys `s` up to the query's token.

    The queries belong to the last `Q` tokens, `block_size` of them to each row of `kept`.
    """
    num_queries, num_heads, head_dim = query.shape
    place, token = np.arange(num_queries), np.arange(len(key))
    is_before = token[None] <= place[:, None] + len(key) - num_queries
    is_seen = kept[place // block_size][:, token // page_size] & is_before
    key, value = (jnp.repeat(x, num_heads // x.shape[1], axis=1) for x in (key, value))
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    logits = _einsum("qnh,snh->nqs", query, key) / math.sqrt(head_dim)
    weights = jax.nn.softmax(jnp.where(is_seen[None], logits, -jnp.inf), axis=-1)
    return _einsum("nqs,snh->qnh", weights, value)


def _blocks(x: Float[Array, "T *axes"], size: int, fill: float) -> Float[Array, "J S *axes"]:
    """Splits tokens into blocks, and pads the last one."""
    padding = ((0, -len(x) % size),) + ((0, 0),) * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, size, *x.shape[1:])


def _power_of_two_above(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Returns the smallest power of two that is not below a positive number."""
    mantissa, exponent = jnp.frexp(x)  # mantissa from 0.5 on
    return jnp.ldexp(jnp.ones_like(x), jnp.where(mantissa == 0.5, exponent - 1, exponent))


def _largest_to_one(x: Float[Array, "J J"], axis: int | None) -> Float[Array, "J J"]:
    largest = abs(x).max(axis=axis, keepdims=True)
    return x / jnp.where(largest > 0.0, largest, 1.0)
