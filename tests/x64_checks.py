"""Compares public calls under `jax_enable_x64` with the same calls without it.

As a program it sets the flag before it imports the package, and makes all checks, which takes
minutes. Arguments limit the policies.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "attention"))
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")

import attention_cases  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import masked_attention  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402

import sketchwalk_jax as sw  # noqa: E402
from sketchwalk_jax.models import experts  # noqa: E402
from sketchwalk_jax.models.params import EXPERTS  # noqa: E402
from sketchwalk_jax.policies import POLICIES, by_name  # noqa: E402


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


def check_attention() -> None:
    """Checks attention functions and their gradients, with a stacked cache."""
    for op in masked_attention.OPERATIONS:
        offset = (3, 0) if op != "decode" else None
        case = masked_attention.Case(op=op, lengths=(43, 33), offset=offset, layer=1)
        arrays, others, _ = masked_attention.draw(case)

        def loss(arrays: Any, others: Any, case: Any = case) -> Any:
            out, lse = masked_attention.attend(*arrays, others, case)
            return jnp.sum(jnp.sin(out)), (out, lse)

        check(f"attention, {op}", jax.jit(jax.value_and_grad(loss, has_aux=True)), arrays, others)


def decode_kernel(*arrays: Any) -> Any:
    """Runs the decode kernel for a token, interpreted."""
    case = attention_cases.Decode(heads=(4, 2), lengths=(65, 7), head_dim=64)
    config = sw.KernelConfig(interpret=True)
    program, shapes = case.program(kernel_config=config)
    return jax.jit(program)(*(jnp.zeros(x.shape, x.dtype) for x in shapes))


def mixture() -> Any:
    """Runs a mixture of experts and its gradients."""

    def loss(x: Any, stacks: Any, is_token: Any) -> Any:
        layer = jnp.ones((), jnp.int32)
        out = experts.mixture(x, is_token, stacks, layer, model_config=tiny.EXPERTS)
        return jnp.sum(jnp.sin(out)), out

    drawn = tiny.params(model=tiny.EXPERTS)["layers"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 20, 32)), jnp.float32)
    stacks = {name: drawn[name] for name in EXPERTS}
    is_token = jnp.arange(20)[None] < jnp.array([20, 11])[:, None]
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, stacks, is_token)


def layers(policy: Any, query: Any, key: Any, value: Any) -> Any:
    """Runs two layers without a cache, then a prompt and a token with one."""
    walk = sw.init_walk(2, 40, policy=policy)
    out, walk = sw.sketchwalk_attention(query, key, value, walk, policy=policy)
    again = sw.sketchwalk_attention(out, key, value, walk, policy=policy)
    cache = sw.init_layer_cache(2, 56, num_heads=4, num_kv_heads=2, head_dim=16, policy=policy)
    step = functools.partial(sw.sketchwalk_cached_attention, policy=policy, return_selection=True)
    read = step(query, key, value, cache, lengths=jnp.array([40, 20]))
    kept = jax.tree.map(np.asarray, read)  # the cache is donated
    return again, kept, step(query[:, :1], key[:, :1], value[:, :1], read[1])


def generate(policy: Any, params: Any, tokens: Any, lengths: Any) -> Any:
    """Generates from a prompt in chunks, with sampling."""
    sampling = sw.Sampling(temperature=0.8, top_k=8, top_p=0.9, repetition_penalty=1.1)
    options = {"max_new_tokens": 3, "sampling": sampling, "chunk_size": policy.block_size}
    return sw.generate(
        params, tokens, lengths=lengths, model_config=tiny.MODEL, policy=policy, **options
    )


def main() -> None:
    """Makes all checks for the named policies, or for all."""
    check_attention()
    check("kernel", decode_kernel)
    check("mixture", mixture)
    policies = {name: by_name(name, block_size=16) for name in POLICIES}
    policies["recommended"] = sw.SketchWalkConfig.recommended(
        block_size=16,
        density=0.5,
        min_tokens=32,
        representatives=2,
        early_representatives=((64, 4),),
    )
    for preset in ("paper", "released", "damped"):
        policies[preset] = by_name("sketchwalk", preset=preset, block_size=16, dense_layers=1)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((2, 40, n, 16)), jnp.float32) for n in (4, 2, 2)]
    for name in sys.argv[1:] or policies:
        print(name, flush=True)
        check(f"layers, {name}", functools.partial(layers, policies[name]), *arrays)
        run = functools.partial(generate, policies[name])
        check(f"generate, {name}", run, tiny.params(), *tiny.prompts(40, 21))


if __name__ == "__main__":
    main()
