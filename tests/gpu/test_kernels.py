"""The public functions with the attention kernels: interpreted, as compiled, or on a GPU."""

import functools

import attention_checks
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import AttentionKernelCase, Decode, HopperPrefill
from kernel_draws import KERNELS
from tolerances import tolerance
from variants import INTERPRET

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.pallas_kernels.config import num_multiprocessors

SHORT = {"heads": (2, 1), "lengths": (64,), "head_dim": 64}

pytestmark = pytest.mark.interpreted


def skip_unless_it_runs(op):
    """Skips a test of Hopper's kernels where they cannot run."""
    if op == "prefill":
        attention_checks.skip_unless_prefill_runs()
    else:
        kernel_draws.skip_unless_hopper()


# The public functions shift queries to block boundaries and make lists themselves.
PUBLIC = {
    "prefill": ((70, 33), None),
    "chunk": ((40, 20), (50, 77)),
    "decode": ((70, 129), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_the_kernels(name):
    """Compares with the XLA implementation, which has tests of its own."""
    new, offset = PUBLIC[name]
    op = "decode" if name == "decode" else "prefill"
    skip_unless_it_runs(op)
    lengths = new if name == "decode" else (100, 100)
    case = AttentionKernelCase(op=op, heads=(4, 2), lengths=lengths, head_dim=64)
    (query, key, value, ids, counts, layer, *_), _ = kernel_draws.draw_attention(case, 5)
    lengths = jnp.asarray(np.add(new, offset or 0), jnp.int32)
    options = {"layer": layer, "kv_lengths": lengths, "return_lse": True}
    key, value = (jnp.nan_to_num(x) for x in (key, value))
    if name == "decode":
        function = block_sparse_decode
    else:
        function = block_sparse_attention
        query = query[:, : max(new)]
        options["query_offset"] = None if offset is None else jnp.asarray(offset, jnp.int32)
        rows = -(-(max(new) + (63 if offset else 0)) // 64)
        ids, counts = ids[:, :, :rows], counts[:, :, :rows]
    selection = BlockSelection(ids, counts, 64)
    call = functools.partial(function, selection=selection, **options)
    ours = jax.jit(functools.partial(call, implementation="mosaic_gpu", kernel_config=KERNELS))
    out, lse = ours(query, key, value)
    wanted, wanted_lse = jax.jit(functools.partial(call, implementation="xla"))(query, key, value)
    for row, length in enumerate(new):
        upto = slice(1 if name == "decode" else length)
        one, other = (np.asarray(x[row, upto], np.float32) for x in (out, wanted))
        np.testing.assert_allclose(one, other, **tolerance("attention", case.dtype))
        np.testing.assert_allclose(
            lse[row, upto], wanted_lse[row, upto], **tolerance("lse", case.dtype)
        )


@pytest.mark.skipif(not INTERPRET, reason="the interpreter has other code")
def test_a_kernel_under_vmap_is_interpreted_too():
    """`vmap` traces the kernel of a jitted function again, after the call."""
    case = Decode(**SHORT)
    (query, key, value, ids, counts, layer, lengths, _), _ = kernel_draws.draw_attention(case, 0)
    key, value = (jnp.nan_to_num(x) for x in (key, value))
    lists = BlockSelection(ids, counts, 64)

    def attend(query, implementation):
        options = {"layer": layer, "kv_lengths": lengths, "kernel_config": KERNELS}
        return block_sparse_decode(
            query, key, value, lists, implementation=implementation, **options
        )

    found, wanted = (
        jax.vmap(functools.partial(attend, implementation=x))(jnp.stack([query, -query]))
        for x in ("mosaic_gpu", "xla")
    )
    pair = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(*pair, **tolerance("attention", case.dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "has_offset"), [(70, True), (1, True), (192, False)])
def test_dense_attention_over_full_lists_is_that_of_xla(num_tokens, has_offset, capfd):
    skip_unless_it_runs("prefill" if num_tokens > 1 else "decode")
    rng = np.random.default_rng(num_tokens)
    offset = jnp.array([100, 0, 33]) if has_offset else None
    lengths = jnp.array([170, 1, 20])
    query = jnp.asarray(rng.normal(size=(3, num_tokens, 4, 64)), jnp.bfloat16)
    key, value = jnp.asarray(rng.normal(size=(2, 2, 3, 192, 2, 64)), jnp.bfloat16)
    where = {"layer": 1, "query_offset": offset, "kv_lengths": lengths}
    attend = functools.partial(dense_attention, query, key, value, **where)
    wanted = attend(implementation="xla")
    out = attend(implementation="mosaic_gpu", kernel_config=KERNELS)
    # Queries after the last key are padding, except in decode.
    first = np.asarray(offset)[:, None] if has_offset else 0
    is_query = first + np.arange(num_tokens) < np.asarray(lengths)[:, None]
    for row in range(3):
        own = is_query[row] | (num_tokens == 1)
        pair = (np.asarray(x[row], np.float32)[own] for x in (out, wanted))
        np.testing.assert_allclose(*pair, atol=0.02, rtol=0.02)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("make", [HopperPrefill, Decode])
def test_a_derivative_of_a_kernel_by_itself_is_refused_in_words(make):
    case = make(**SHORT)
    function, _ = case.program(kernel_config=KernelConfig(interpret=True))
    (query, *others), _ = kernel_draws.draw_attention(case, 0)

    def total(query):
        return jnp.sum(function(query, *others)[0].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="no derivative.*block_sparse_attention"):
        jax.eval_shape(jax.grad(total), query)


@pytest.mark.parametrize(
    ("facts", "expected"),  # a CPU compiles ahead of time
    [({"platform": "gpu", "core_count": 78}, 78), ({"platform": "cpu"}, 132)],
)
def test_programs_are_counted_for_the_default_device(facts, expected, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), facts)])
    assert num_multiprocessors() == expected
