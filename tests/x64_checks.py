"""Compares public calls under `jax_enable_x64` with the same calls without it.

As a program it sets the flag before it imports the package, and makes all checks, which takes
minutes. Arguments limit the policies.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")

import attention_cases  # noqa: E402
import cases  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402

import sketchwalk_jax as sw  # noqa: E402
from sketchwalk_jax.policies import POLICIES, by_name  # noqa: E402

RECOMMENDED = sw.SketchWalkConfig.recommended(
    block_size=16, density=0.5, min_tokens=32, representatives=2, early_representatives=((64, 4),)
)
INTERPRETER = sw.KernelConfig(interpret=True)


def check(name: str, function: Callable[..., Any], *arrays: Any) -> None:
    """Raises unless a call gives the same types and numbers with and without the flag."""
    with jax.enable_x64(True):
        found = jax.tree.leaves(function(*arrays))
    with jax.enable_x64(False):
        wanted = jax.tree.leaves(function(*arrays))
    types = [[x.dtype for x in leaves] for leaves in (found, wanted)]
    assert types[0] == types[1], f"{name}: {types[0]} in place of {types[1]}"
    for one, other in zip(found, wanted, strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other, err_msg=name)


def draw(batch: int, tokens: int, *heads: int, head_dim: int = 16) -> list[Any]:
    """Draws arrays `[B, T, heads, H]`."""
    rng = np.random.default_rng(0)
    sizes = [(batch, tokens, x, head_dim) for x in heads]
    return [jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes]


def attend(query: Any, key: Any, value: Any, ids: Any, counts: Any) -> Any:
    """Attends to lists, to everything and in decode, with a stacked cache; and takes gradients."""
    lists = sw.BlockSelection(ids, counts, 16)
    where = {"kv_lengths": jnp.array([40, 33]), "layer": 1, "return_lse": True}
    token = sw.BlockSelection(ids[:, :, :1], counts[:, :, :1], 16)

    def loss(*arrays: Any) -> Any:
        offset = {"query_offset": jnp.array([3, 0])}
        found = sw.block_sparse_attention(*arrays, lists, **offset, **where)
        return jnp.sum(jnp.sin(found[0] + sw.dense_attention(*arrays, **offset, **where)[0])), found

    decoded = sw.block_sparse_decode(query[:, :1], key, value, token, **where)
    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(query, key, value), decoded


def layers(policy: Any, query: Any, key: Any, value: Any) -> Any:
    """Runs two layers without a cache, then a prompt and a token with one."""
    options = {"num_heads": query.shape[2], "num_kv_heads": key.shape[2], "head_dim": 16}
    walk = sw.init_walk(*query.shape[:2], policy=policy)
    out, walk = sw.sketchwalk_attention(query, key, value, walk, policy=policy)
    again = sw.sketchwalk_attention(out, key, value, walk, policy=policy)
    cache = sw.init_layer_cache(len(query), query.shape[1] + 16, policy=policy, **options)
    step = functools.partial(sw.sketchwalk_cached_attention, policy=policy, return_selection=True)
    read = step(query, key, value, cache, lengths=jnp.array([query.shape[1], 20]))
    kept = jax.tree.map(np.asarray, read)  # the cache is donated
    return again, kept, step(query[:, :1], key[:, :1], value[:, :1], read[1])


def generate(policy: Any, params: Any, tokens: Any, lengths: Any) -> Any:
    """Generates from a prompt in chunks, with sampling."""
    sampling = sw.Sampling(temperature=0.8, top_k=8, top_p=0.9, repetition_penalty=1.1)
    options = {"max_new_tokens": 3, "sampling": sampling, "chunk_size": policy.block_size}
    return sw.generate(
        params, tokens, lengths=lengths, model_config=tiny.MODEL, policy=policy, **options
    )


def decode_kernel(*arrays: Any) -> Any:
    """Runs the decode kernel for a token, interpreted."""
    case = attention_cases.Decode(heads=(4, 2), lengths=(65, 7), head_dim=64)
    program, shapes = case.program(kernel_config=INTERPRETER)
    return jax.jit(program)(*(jnp.zeros(x.shape, x.dtype) for x in shapes))


def check_attention() -> None:
    """All attention functions."""
    query, key, value = draw(2, 40, 4, 2, 2)
    room = ((1, 0), (0, 0), (0, 8), (0, 0), (0, 0))  # another layer, and whole blocks
    stacked = [np.pad(x[None], room) for x in (key, value)]
    ids, counts = cases.pack_lists(np.tril(np.ones((2, 1, 4, 3), bool)))
    check("attention", jax.jit(attend), query, *stacked, ids, counts)


def check_layers(name: str, policy: Any) -> None:
    """Checks a policy in layers with and without a cache."""
    check(f"layers, {name}", functools.partial(layers, policy), *draw(2, 40, 4, 2, 2))


def main() -> None:
    """Makes all checks for the named policies, or for all."""
    check_attention()
    check("kernel", decode_kernel)
    policies = {"recommended": RECOMMENDED}
    policies |= {name: by_name(name, block_size=16) for name in POLICIES}
    for preset in ("paper", "released", "damped"):
        policies[preset] = by_name("sketchwalk", preset=preset, block_size=16, dense_layers=1)
    params, prompts = tiny.params(), tiny.prompts(40, 21)
    for name in sys.argv[1:] or policies:
        print(name, flush=True)
        check_layers(name, policies[name])
        run = functools.partial(generate, policies[name])
        check(f"generate, {name}", run, params, *prompts)


if __name__ == "__main__":
    main()
