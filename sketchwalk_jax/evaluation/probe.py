"""How much of dense attention a selection holds, layer by layer, on the way that dense goes.

The model runs densely. At every sparse layer each policy selects from the same queries and keys,
its walk carried along, and its output is compared and thrown away:

* *mass recall*, the share of the softmax weights of dense attention that fall on selected blocks,
  mean over query tokens and heads. It is `exp(lse_sparse - lse_dense)`, with the log-sum-exp of
  the scores over the selected and over all keys, so lists per head need no special care;
* *output error*, `‖o_sparse - o_dense‖ / ‖o_dense‖` over all query tokens and heads;
* *bytes read* for every decoded token, from the lists themselves (`decode_bytes`).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention import attend_rows, block_sparse_decode, dense_attention
from sketchwalk_jax.cache import Cache, init_cache, num_dense_layers, write_prompt, write_token
from sketchwalk_jax.cached_attention import Settings, observe_layer
from sketchwalk_jax.decode_bytes import DecodeBytes, decode_bytes
from sketchwalk_jax.evaluation.programs import Together
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import Attend
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.steps import all_layers

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbeSums:
    """Sums over query tokens, for `P` policies, `L` sparse layers and `B` sequences; float32.

    Attributes:
      mass: Share of the softmax weights on selected blocks, `[L, P, B]`, mean over heads.
      squared_error: `‖o_sparse - o_dense‖²`, `[L, P, B]`.
      squared_norm: `‖o_dense‖²`, `[L, P, B]`.
      queries: Query tokens, `[L, P, B]`.
      key_bytes: Bytes of keys that decoding read, `[L, P, B]`; 0 in prefill.
      value_bytes: The same of values.
      metadata_bytes: The same of what the policy selected by.
    """

    mass: Float[Array, "L P B"]
    squared_error: Float[Array, "L P B"]
    squared_norm: Float[Array, "L P B"]
    queries: Float[Array, "L P B"]
    key_bytes: Float[Array, "L P B"]
    value_bytes: Float[Array, "L P B"]
    metadata_bytes: Float[Array, "L P B"]

    def __add__(self, other: Self) -> Self:
        """Sums over the query tokens of both."""
        return jax.tree.map(lambda x, y: x + y, self, other)

    def by_layer(self, policy: int) -> tuple[list[float], list[float]]:
        """Mass recall and output error of one policy in every sparse layer, over all sequences.

        Empty lists where the policy was not measured.
        """
        mass, error, norm, queries = (
            np.asarray(part, np.float64)[:, policy].sum(axis=-1)
            for part in (self.mass, self.squared_error, self.squared_norm, self.queries)
        )
        if not queries.all():
            return [], []
        return (mass / queries).tolist(), np.sqrt(error / norm).tolist()

    def bytes_per_token(self, policy: int) -> tuple[float, float, float] | None:
        """Keys, values and metadata that one policy read, mean over query tokens.

        Added up over the sparse layers. `None` where the policy was not measured.
        """
        queries = np.asarray(self.queries, np.float64)[:, policy].sum(axis=-1)
        if not queries.size or not queries.all():
            return None
        keys, values, metadata = (
            float((np.asarray(part, np.float64)[:, policy].sum(axis=-1) / queries).sum())
            for part in (self.key_bytes, self.value_bytes, self.metadata_bytes)
        )
        return keys, values, metadata


def _compare(
    sparse: Any, dense: Any, is_query: Bool[Array, "B T"], read: DecodeBytes | None = None
) -> ProbeSums:
    """Sums over the real queries of one layer and policy; from outputs and log-sum-exps."""

    def total(x: Float[Array, "B T *rest"]) -> Float[Array, "B"]:
        mask = is_query.reshape(is_query.shape + (1,) * (x.ndim - 2))
        return jnp.sum(jnp.where(mask, x, 0.0), axis=tuple(range(1, x.ndim)))

    share = jnp.exp(jnp.minimum(sparse[1] - dense[1], 0.0))  # rounding apart, never above 1
    wide = dense[0].astype(jnp.float32)
    return ProbeSums(
        mass=total(jnp.mean(share, axis=-1)),
        squared_error=total((sparse[0].astype(jnp.float32) - wide) ** 2),
        squared_norm=total(wide**2),
        queries=jnp.sum(is_query, axis=1, dtype=jnp.float32),
        **{
            f"{name}_bytes": jnp.zeros(is_query.shape[:1], jnp.float32)
            if read is None
            else jnp.where(is_query[:, 0], getattr(read, plural), 0.0)
            for name, plural in (("key", "keys"), ("value", "values"), ("metadata", "metadata"))
        },
    )


def _nothing(like: Int[Array, "B"]) -> ProbeSums:
    """Of a policy that does not select in this phase."""
    return _zeros(like.shape)


def _zeros(shape: tuple[int, ...]) -> ProbeSums:
    names = (field.name for field in dataclasses.fields(ProbeSums))
    return ProbeSums(**dict.fromkeys(names, jnp.zeros(shape, jnp.float32)))


def _stack(sums: Sequence[ProbeSums]) -> ProbeSums:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *sums)


def _prefill_attention(
    span: Span, *, is_sparse: bool, first_sparse: int, settings: Settings
) -> Attend:
    """Dense attention of new prompts, and what each policy would have made of it."""
    together: Any = settings.config

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walks = state
        keys = write_prompt(cache.key, key, layer=layer, start=None, valid=span.valid)
        values = write_prompt(cache.value, value, layer=layer, start=None, valid=span.valid)
        dense = dense_attention(
            query, keys, values, layer=layer, kv_lengths=span.end, return_lse=True
        )
        statistics, sums = cache.statistics, None
        if is_sparse:
            own, statistics = observe_layer(
                statistics, query, key, config=together, index=layer - first_sparse, span=span
            )
            walks, found = list(walks), []
            for index, policy in enumerate(together.policies):
                if "prefill" not in policy.phases:
                    found.append(_nothing(span.end))
                    continue
                selection, walks[index] = policy.select_prefill(
                    query, keys, own[index], walks[index], layer=layer, span=span
                )
                sparse = attend_rows(
                    query,
                    keys,
                    values,
                    selection,
                    first_block=span.first_block,
                    layer=layer,
                    kv_lengths=span.end,
                )
                found.append(_compare(sparse, dense, span.valid))
            walks, sums = tuple(walks), _stack(found)
        cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
        return dense[0], (cache, walks), (jnp.zeros(span.end.shape), sums)

    return attend


def _decode_attention(
    positions: Int[Array, "B"],
    active: Bool[Array, "B"],
    *,
    is_sparse: bool,
    first_sparse: int,
    settings: Settings,
) -> Attend:
    """The same for one token per sequence."""
    together: Any = settings.config
    end = positions + 1

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walks = state
        keys = write_token(cache.key, key, layer=layer, positions=positions, active=active)
        values = write_token(cache.value, value, layer=layer, positions=positions, active=active)
        dense = dense_attention(
            query,
            keys,
            values,
            layer=layer,
            query_offset=positions,
            kv_lengths=end,
            return_lse=True,
        )
        statistics, sums = list(cache.statistics), None
        if is_sparse:
            walks, found = list(walks), []
            for index, policy in enumerate(together.policies):
                span = Span(positions // policy.block_size, active[:, None], end, end)
                own, statistics[index] = observe_layer(
                    statistics[index],
                    query,
                    key,
                    config=policy,
                    index=layer - first_sparse,
                    span=span,
                )
                if "decode" not in policy.phases:
                    found.append(_nothing(end))
                    continue
                selection, walks[index] = policy.select_decode(
                    query, keys, own, walks[index], layer=layer, positions=positions
                )
                sparse = block_sparse_decode(
                    query, keys, values, selection, kv_lengths=end, layer=layer, return_lse=True
                )
                kv_heads, head_dim = keys.shape[3:]
                shape = LayerShape(query.shape[2], kv_heads, head_dim, keys.dtype)
                read = decode_bytes(policy, selection, positions, shape=shape)
                found.append(_compare(sparse, dense, active[:, None], read))
            walks, sums = tuple(walks), _stack(found)
        cache = dataclasses.replace(cache, key=keys, value=values, statistics=tuple(statistics))
        return dense[0], (cache, walks), (jnp.zeros(end.shape), sums)

    return attend


def _walks(together: Together, *, batch: int, num_tokens: int | None, capacity: int) -> PyTree:
    return tuple(
        policy.init_walk(
            batch=batch,
            num_rows=1 if num_tokens is None else num_tokens // policy.block_size,
            num_blocks=capacity // policy.block_size,
        )
        for policy in together.policies
    )


def _no_sums(together: Together, num_sparse: int, batch: int) -> ProbeSums:
    return _zeros((num_sparse, len(together.policies), batch))


def probe_prefill(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    model_config: ModelConfig,
    together: Together,
) -> tuple[ProbeSums, Cache]:
    """Compares every policy's attention with dense attention while prompts are read.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded; `T` is a multiple of every policy's block size.
      lengths: Tokens of each prompt.
      model_config: The model.
      together: The policies, all with the same number of dense layers.

    Returns:
      The sums over prompt tokens, and the dense cache with every policy's statistics.
    """
    batch, num_tokens = tokens.shape
    settings = Settings(model_config=model_config, config=together)
    dtype = params["embed"]["embedding"].dtype
    cache = init_cache(model_config, together, batch=batch, max_tokens=num_tokens, dtype=dtype)
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    nothing = jnp.zeros((batch,), jnp.int32)
    span = Span(nothing, column < lengths[:, None], lengths, lengths)
    _, cache, _, sums = all_layers(
        params,
        tokens,
        jnp.broadcast_to(column, tokens.shape),
        cache,
        _walks(together, batch=batch, num_tokens=num_tokens, capacity=cache.capacity),
        settings=settings,
        attention=partial(_prefill_attention, span),
    )
    if sums is None:
        sums = _no_sums(together, 0, batch)
    return sums, dataclasses.replace(cache, lengths=lengths)


def probe_decode(
    params: PyTree,
    cache: Cache,
    continuation: Int[Array, "B U"],
    num_told: Int[Array, "B"],
    *,
    model_config: ModelConfig,
    together: Together,
) -> ProbeSums:
    """The same while the tokens of `continuation` are fed one by one, `num_told` of each."""
    batch = num_told.shape[0]
    settings = Settings(model_config=model_config, config=together)
    num_sparse = model_config.num_layers - num_dense_layers(model_config, together)

    def one_token(step: Array, carry: tuple[Cache, ProbeSums]) -> tuple[Cache, ProbeSums]:
        cache, sums = carry
        active = step < num_told
        _, cache, _, found = all_layers(
            params,
            continuation[:, step][:, None],
            cache.lengths[:, None],
            cache,
            _walks(together, batch=batch, num_tokens=None, capacity=cache.capacity),
            settings=settings,
            attention=partial(_decode_attention, cache.lengths, active),
        )
        lengths = cache.lengths + active.astype(jnp.int32)
        return dataclasses.replace(cache, lengths=lengths), sums if found is None else sums + found

    carry = (cache, _no_sums(together, num_sparse, batch))
    return jax.lax.fori_loop(0, jnp.max(num_told), one_token, carry)[1]
