"""Next-token choice: greedy, temperature, top-k, top-p, min-p, repetition penalty.

The settings are arrays, so new values do not recompile; only greedy decoding has a program of its
own. Each setting is one number for the batch or one for each sequence. Their order and meaning
follow `generate` of transformers.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from sketchwalk_jax.pytree import make_exportable
from sketchwalk_jax.validation import describe, is_known

# Smaller temperatures are greedy, like 0: hardware may flush them to zero.
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Storage type and valid values of one field of `Sampling`."""

    dtype: DTypeLike
    requirement: str
    is_valid: Callable[[np.ndarray], Any]


_RULES = {
    "temperature": _Rule(
        np.float32, "finite and at least 0", lambda x: (x >= 0) & (x <= np.finfo(np.float32).max)
    ),
    "top_k": _Rule(
        np.int32, "an integer in [0, 2**31)", lambda x: (x >= 0) & (x < 2**31) & (x % 1 == 0)
    ),
    "top_p": _Rule(np.float32, "in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
    "min_p": _Rule(np.float32, "in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
    "repetition_penalty": _Rule(
        np.float32, "finite and greater than 0", lambda x: (x > 0) & (x <= np.finfo(np.float32).max)
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Settings for drawing the next token. The defaults draw from the model's distribution.

    Every field is one number, or `B` numbers, one for each sequence of the batch. All fields are
    stored as float32 or int32 arrays, so that one compiled function serves all values. (They are
    NumPy arrays unless you pass a JAX array: making a `Sampling` does not initialise a backend.)

    Attributes:
      temperature: Divides the logits; finite and at least 0. With 0 the best token is chosen
        (greedy), and `top_k`, `top_p` and `min_p` are ignored.
      top_k: Keeps the `top_k` best tokens, and all tokens that tie with the last of them. 0 keeps
        all.
      top_p: Keeps the smallest set of best tokens whose probabilities reach `top_p`, in [0, 1]. 1
        keeps all.
      min_p: Keeps the tokens whose probability is at least `min_p` times the best token's, in
        [0, 1]. 0 keeps all.
      repetition_penalty: Divides the positive and multiplies the negative logits of tokens that
        occurred before, including in the prompt. Greater than 0; 1 changes nothing. It also applies
        to greedy decoding.

    Raises:
      ValueError: If a field is no number or array of numbers, or a concrete value is out of range.
        Values traced by `jax.jit` are not checked.

    Example:
      >>> Sampling(temperature=0.7, top_p=0.9).top_k
      array(0, dtype=int32)
      >>> Sampling(temperature=[0.0, 1.0]).temperature  # the first of two sequences is greedy
      array([0., 1.], dtype=float32)
    """

    temperature: ArrayLike = 1.0
    top_k: ArrayLike = 0
    top_p: ArrayLike = 1.0
    min_p: ArrayLike = 0.0
    repetition_penalty: ArrayLike = 1.0

    def __post_init__(self) -> None:
        """Checks the numbers and stores them as arrays."""
        for name in _RULES:
            value = getattr(self, name)
            _check_type(name, value)
            object.__setattr__(self, name, _as_leaf(name, value))

    @classmethod
    def greedy(cls, *, repetition_penalty: ArrayLike = 1.0) -> "Sampling":
        """Settings that always choose the best token, after the repetition penalty.

        Example:
          >>> float(Sampling.greedy().temperature)
          0.0
        """
        return cls(temperature=0.0, repetition_penalty=repetition_penalty)

    @property
    def is_greedy(self) -> bool:
        """Whether every sequence is known to be greedy; a traced temperature is not known.

        Example:
          >>> Sampling(temperature=[0.0, 1.0]).is_greedy
          False
        """
        found = self.temperature
        return is_known(found) and bool(np.all(np.asarray(found) < _SMALLEST_TEMPERATURE))


def _flatten_with_keys(sampling: Sampling) -> tuple[list[tuple[Any, Any]], None]:
    return [(jax.tree_util.GetAttrKey(name), getattr(sampling, name)) for name in _RULES], None


def _unflatten(_: None, leaves: Iterable[Any]) -> Sampling:
    # Avoid `__init__`: it would reject the leaves that JAX puts in (None, shapes, `object()`).
    made = object.__new__(Sampling)
    for name, leaf in zip(_RULES, leaves, strict=True):
        object.__setattr__(made, name, _as_leaf(name, leaf))
    return made


jax.tree_util.register_pytree_with_keys(Sampling, _flatten_with_keys, _unflatten)
make_exportable(Sampling)


def _check_type(name: str, value: Any) -> None:
    """Raises unless `value` may be a setting, or describes an array (dtype, shape, sharding)."""
    if isinstance(value, Sharding | PartitionSpec):
        return
    try:
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    except (ValueError, OverflowError):  # lists of different lengths
        dtype = None
    is_scalar = isinstance(value, int | float | list) or hasattr(value, "shape")
    if not is_scalar or dtype is None or not _is_real(dtype):
        raise ValueError(f"{name} must be {_RULES[name].requirement}, got {describe(value)}")


def _as_leaf(name: str, value: Any) -> Any:
    """Returns `value` as an array of the field's dtype, checked if it is concrete.

    JAX rebuilds the class with other leaves (None, shapes, shardings): they pass unchanged.
    """
    rule = _RULES[name]
    if isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, rule.dtype) if _is_real(value.dtype) else value
    if not isinstance(value, int | float | list | np.generic | np.ndarray | jax.Array):
        return value
    if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable):
        return value
    numbers = np.asarray(value)
    if not _is_real(numbers.dtype):
        return value
    if not np.all(rule.is_valid(numbers.astype(np.float64))):
        raise ValueError(f"{name} must be {rule.requirement}, got {value}")
    if isinstance(value, jax.Array):
        return jnp.asarray(value, rule.dtype)
    return numbers.astype(rule.dtype)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def check_key(key: Any, sampling: Sampling | None) -> None:
    """Raises a ValueError for a key without `sampling`, because it would have no effect."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling or None, got {describe(sampling)}")
    if key is not None and sampling is None:
        raise ValueError(
            "key must be None without sampling, which is greedy and draws nothing, got a key; pass "
            "sampling=Sampling(...) as well"
        )


def process_logits(
    logits: Float[Array, "B V"], sampling: Sampling, seen: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """Returns the logits to sample from: penalised, scaled, and `-inf` for removed tokens.

    In order, with `s` the logits of one sequence: `s ← s·r if s < 0 else s/r` for seen tokens,
    `s ← s / temperature`, then top-k, top-p over the tokens left, min-p over the tokens left; at
    least one token stays. Settings at their defaults change no bit. If equal logits are at the edge
    of top-p, the higher token ids stay. A greedy sequence keeps only its best token, with its
    penalised logit; so does one whose logits overflow float32 when divided by the temperature.

    Rows are independent. The only sort runs only if some sequence truncates.

    Args:
      logits: Scores of the next token, any float dtype; they are processed in float32.
      sampling: The settings.
      seen: Whether each token is in the prompt or was generated (`seen_tokens`, `mark_seen`).

    Returns:
      float32 logits.

    Raises:
      ValueError: If a setting is neither a scalar nor has one value for each sequence.

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
      >>> kept = process_logits(logits, Sampling(top_p=0.6), jnp.zeros((1, 3), bool))
      >>> jnp.isfinite(kept).tolist()
      [[True, True, False]]
    """
    setting = _columns(sampling, batch=logits.shape[0])
    temperature = setting["temperature"]
    top_k, top_p, min_p = setting["top_k"], setting["top_p"], setting["min_p"]

    scores = _penalised(logits, setting["repetition_penalty"], seen)
    is_greedy = temperature < _SMALLEST_TEMPERATURE
    scaled = scores / jnp.where(is_greedy, 1.0, temperature)
    is_greedy |= jnp.max(scaled, axis=-1, keepdims=True) == jnp.inf

    truncates = ~is_greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    kept = jax.lax.cond(
        jnp.any(truncates),
        _truncation,
        lambda scaled, *_: jnp.ones_like(scaled, bool),
        *(scaled, top_k, top_p, min_p),
    )
    best = jnp.argmax(scores, axis=-1, keepdims=True)
    is_best = jax.lax.broadcasted_iota(best.dtype, scores.shape, 1) == best
    return jnp.where(
        is_greedy,
        jnp.where(is_best, scores, -jnp.inf),
        jnp.where(kept, scaled, -jnp.inf),
    )


def _penalised(
    logits: Float[Array, "B V"], penalty: Float[Array, "B 1"], seen: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """Applies the repetition penalty, in float32."""
    scores = logits.astype(jnp.float32)
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def _truncation(
    scores: Float[Array, "B V"],
    top_k: Int[Array, "B 1"],
    top_p: Float[Array, "B 1"],
    min_p: Float[Array, "B 1"],
) -> Bool[Array, "B V"]:
    """Whether top-k, top-p and min-p keep each token.

    In ascending order of (score, id) each filter keeps a tail. Together they keep the shortest
    tail, all tokens from its first one on.
    """
    vocab_size = scores.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    ascending, ascending_ids = jax.lax.sort((scores, ids), dimension=-1, num_keys=1, is_stable=True)

    first_of_k = jnp.where(top_k > 0, jnp.maximum(vocab_size - top_k, 0), 0)
    in_top_k = ascending >= jnp.take_along_axis(ascending, first_of_k, axis=-1)

    # Weights relative to the best token are exactly equal for ties, and need no division.
    best = ascending[:, -1:]
    best = jnp.where(jnp.isfinite(best), best, 0.0)
    weights = jnp.where(in_top_k, jnp.exp(ascending - best), 0.0)
    mass = jax.lax.cumsum(weights, axis=1, reverse=True)
    mass_above = jnp.pad(mass[:, 1:], ((0, 0), (0, 1)))
    in_top_p = (mass_above < top_p * mass[:, :1]) | (top_p >= 1)

    is_last = ids == vocab_size - 1
    is_kept = (in_top_k & in_top_p & (weights >= min_p)) | is_last
    first = jnp.argmax(is_kept, axis=-1, keepdims=True)
    edge = jnp.take_along_axis(ascending, first, axis=-1)
    edge_id = jnp.take_along_axis(ascending_ids, first, axis=-1)
    return (scores > edge) | ((scores == edge) & (ids >= edge_id))


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    seen: Bool[Array, "B V"],
    keys: Key[Array, "B"],
) -> Int[Array, "B"]:
    """Draws one token for each sequence from `softmax(process_logits(logits, sampling, seen))`.

    Row `b` depends on row `b` of the arguments only, its key included, so a sequence draws the same
    tokens alone and in a batch. Get keys from `sequence_keys`, and fold in the step for each token.

    Returns int32 token ids. Greedy sequences ignore their key.

    Raises:
      ValueError: If `keys` is not one typed key for each sequence, or a setting has another shape
        than `[]` or `[B]`.

    Example:
      >>> logits = jnp.array([[0.0, 2.0, 1.0]])
      >>> keys = sequence_keys(jax.random.key(0), batch=1)
      >>> sample(logits, Sampling.greedy(), jnp.zeros((1, 3), bool), keys).tolist()
      [1]
    """
    batch = logits.shape[0]
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape != (batch,):
        raise ValueError(
            f"keys must be {batch} typed keys, one for each sequence (sequence_keys makes them), "
            f"got {keys.dtype}{list(keys.shape)}"
        )

    def draw() -> Int[Array, "B"]:
        processed = process_logits(logits, sampling, seen)
        return jax.vmap(jax.random.categorical)(keys, processed).astype(jnp.int32)

    # A GPU asks the host which branch to take. If all are greedy, skip the second branch in `draw`.
    is_greedy = _columns(sampling, batch=batch)["temperature"] < _SMALLEST_TEMPERATURE
    return jax.lax.cond(jnp.all(is_greedy), lambda: best_tokens(logits, sampling, seen), draw)


def best_tokens(
    logits: Float[Array, "B V"], sampling: Sampling, seen: Bool[Array, "B V"]
) -> Int[Array, "B"]:
    """Returns the tokens that greedy decoding chooses, after the repetition penalty, as int32 ids.

    Of equal logits, the first one is chosen.

    Example:
      >>> logits = jnp.array([[0.0, 2.0, 1.0]])
      >>> best_tokens(logits, Sampling.greedy(), jnp.zeros((1, 3), bool)).tolist()
      [1]
    """
    penalty = _columns(sampling, batch=logits.shape[0])["repetition_penalty"]
    return jnp.argmax(_penalised(logits, penalty, seen), axis=-1).astype(jnp.int32)


def sequence_keys(key: Shaped[Array, "..."], *, batch: int) -> Key[Array, "{batch}"]:
    """Returns one key for each sequence of a batch: `keys[b] = fold_in(key, b)`.

    Row `b` is the same in a batch of any size. The key of a sequence's next token is
    `jax.random.fold_in(keys[b], step)`, with `step` the number of tokens drawn so far.

    Args:
      key: A key from `jax.random.key` or `jax.random.PRNGKey`. Or `batch` typed keys, which are
        returned unchanged (use `keys[b : b + 1]` to repeat one sequence of a batch alone).
      batch: Number of sequences.

    Returns:
      Typed keys `[batch]`.

    Raises:
      ValueError: If `key` is neither one key nor `batch` typed keys.

    Example:
      >>> sequence_keys(jax.random.key(0), batch=4).shape
      (4,)
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 1:
        key = jax.random.wrap_key_data(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape not in ((), (batch,)):
        raise ValueError(
            f"key must be one key or {batch} typed keys, got {key.dtype}{list(key.shape)}"
        )
    if key.shape == (batch,):
        return key
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch, dtype=jnp.int32))


def seen_tokens(
    tokens: Int[Array, "B T"], lengths: Int[Array, "B"], *, vocab_size: int
) -> Bool[Array, "B V"]:
    """Marks the ids among the first `lengths[b]` tokens of prompts, for the repetition penalty.

    Ids outside `[0, vocab_size)` are ignored.

    Example:
      >>> seen_tokens(jnp.array([[2, 0, 3]]), jnp.array([2]), vocab_size=4).tolist()
      [[True, False, True, False]]
    """
    batch, num_tokens = tokens.shape
    is_real = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] < lengths[:, None]
    return _mark(jnp.zeros((batch, vocab_size), bool), jnp.where(is_real, tokens, vocab_size))


def mark_seen(seen: Bool[Array, "B V"], tokens: Int[Array, "B"]) -> Bool[Array, "B V"]:
    """Marks one more token for each sequence as seen; ids outside `[0, V)` are ignored.

    Example:
      >>> mark_seen(jnp.zeros((1, 3), bool), jnp.array([1])).tolist()
      [[False, True, False]]
    """
    return _mark(seen, tokens[:, None])


def _mark(seen: Bool[Array, "B V"], tokens: Int[Array, "B T"]) -> Bool[Array, "B V"]:
    batch, vocab_size = seen.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # Negative ids would count from the end; ids past the end are dropped.
    tokens = jnp.where(tokens < 0, vocab_size, tokens)
    return seen.at[rows, tokens].set(True, mode="drop")


def _columns(sampling: Sampling, *, batch: int) -> dict[str, Shaped[Array, "{batch} 1"]]:
    """Returns the settings by name, one number for each sequence."""
    found = {}
    for name, rule in _RULES.items():
        value = jnp.asarray(getattr(sampling, name), rule.dtype)
        if value.shape not in ((), (batch,)):
            raise ValueError(f"{name} must have shape [] or [{batch}], got {list(value.shape)}")
        found[name] = jnp.broadcast_to(value, (batch,))[:, None]
    return found
