"""The reference itself: against loops, the log-domain oracle, and code that nobody here wrote."""

import ast
import math
from fractions import Fraction
from pathlib import Path

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import reference
from hypothesis import given
from tolerances import tolerance

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

WALKS = {
    "paper": SketchWalkConfig.paper(block_size=16),
    "relu power": SketchWalkConfig.paper(block_size=16, transition="relu_power"),
    "two steps": SketchWalkConfig.paper(block_size=16, exponent=2, walk_degree=2),
    "damped": SketchWalkConfig.damped(block_size=16),
    "damped, three steps": SketchWalkConfig.damped(block_size=16, walk_degree=3),
    "softmax product": SketchWalkConfig.damped(block_size=16, beta=None),
    "one hop": SketchWalkConfig.one_hop(block_size=16),
    "one hop of powers": SketchWalkConfig.one_hop(block_size=16, transition="power"),
}


def test_reference_imports_only_the_configuration():
    folder = Path(reference.__file__).parent
    imported = {
        node.module
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sketchwalk_jax")
    }
    presets = ("sketchwalk", "released", "recommended")
    allowed = {f"sketchwalk_jax.policies.{name}" for name in presets}
    assert imported <= allowed


def test_hadamard_is_in_natural_order():
    scipy_linalg = pytest.importorskip("scipy.linalg")
    np.testing.assert_array_equal(reference.hadamard(128), scipy_linalg.hadamard(128))


def test_scores_equal_loops_over_blocks_and_tokens():
    num_tokens, size, head_dim = 53, 16, 32
    layers = cases.draw_layers(0, num_layers=1, num_tokens=num_tokens, head_dim=head_dim)
    query, key = (x[0].astype(np.float64) for x in (layers.queries, layers.keys))
    expected = np.zeros((4, 4))
    for i in range(4):
        for j in range(i + 1):
            queries = query[i * size : min((i + 1) * size, num_tokens)]
            keys = key[j * size : min((j + 1) * size, num_tokens)]
            pairs = [  # Definition 2.1 on head means: the mean over all pairs of tokens
                q @ k for q in queries.mean(1) for k in keys.mean(1)
            ]
            expected[i, j] = np.mean(pairs) / math.sqrt(head_dim)
    config = SketchWalkConfig.paper(block_size=size, sketch_dim=None)
    actual = reference.block_scores(layers.queries[0], layers.keys[0], config)
    np.testing.assert_allclose(actual, expected, **tolerance("scores"))


@jax.jit
def jax_attention(query, key, value):
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, return_residual=True)


@pytest.mark.parametrize(
    ("heads", "num_tokens"), list(zip(cases.HEADS.values(), cases.LENGTHS[:5], strict=True))
)
def test_causal_attention_equals_jax(heads, num_tokens):
    layers = cases.draw_layers(2, num_layers=1, num_tokens=num_tokens, heads=heads, spread=0.0)
    query, key, value = (jnp.asarray(x[0]) for x in (layers.queries, layers.keys, layers.values))
    mask = reference.token_mask(None, num_tokens, 64)
    actual, lse = reference.masked_attention(query, key, value, mask)
    expected, residual = jax_attention(query[None], key[None], value[None])
    np.testing.assert_allclose(actual, expected[0], **tolerance("attention"))
    np.testing.assert_allclose(lse, residual[0], **tolerance("lse"))


def test_attention_over_nothing_is_zero():
    x = jnp.ones((2, 1, 4))
    mask = jnp.array([[False, False], [True, False]])
    output, lse = reference.masked_attention(x, x, x, mask)
    np.testing.assert_array_equal(output[:, 0, 0], [0.0, 1.0])
    assert lse[0, 0] == -jnp.inf


def test_mask_may_differ_between_heads():
    layers = cases.draw_layers(3, num_layers=1, num_tokens=20, heads=(4, 2))
    query, key, value = layers.queries[0], layers.keys[0], layers.values[0]
    mask = np.random.default_rng(0).random((4, 20, 20)) < 0.5
    together, _ = reference.masked_attention(query, key, value, mask)
    for head in range(4):
        alone, _ = reference.masked_attention(
            query[:, [head]], key[:, [head // 2]], value[:, [head // 2]], mask[head]
        )
        np.testing.assert_allclose(together[:, [head]], alone, **tolerance("attention"))


@pytest.mark.parametrize("config", WALKS.values(), ids=WALKS.keys())
def test_walk_equals_the_log_domain_oracle(config):
    layers = cases.draw_layers(4, num_layers=9, num_tokens=20 * 16)
    scores = [
        reference.block_scores(query, key, config)
        for query, key in zip(layers.queries, layers.keys, strict=True)
    ]
    states = reference.walk_layers(scores, config)
    for state, expected in zip(states, oracle.log2_walk(scores, config), strict=True):
        is_empty = np.isneginf(expected).all(1)
        np.testing.assert_array_equal(is_empty, (state == 0.0).all(1))
        expected = expected[~is_empty]
        with np.errstate(divide="ignore"):
            actual = np.log2(state[~is_empty])
        shift = actual.max(1, keepdims=True) - expected.max(1, keepdims=True)
        if config.transition == "softmax":
            np.testing.assert_allclose(shift, 0.0, atol=1e-9)
        near = expected > expected.max(1, keepdims=True) - 500.0
        np.testing.assert_allclose((expected + shift)[near], actual[near], rtol=1e-9, atol=1e-9)


def test_budget_counts_the_decimal_that_was_written():
    counts = reference.budget(SketchWalkConfig.paper(density=0.1), 60)
    assert counts[29] == 3 and math.ceil(Fraction(0.1) * 30) == 4
    assert reference.budget(SketchWalkConfig.paper(density=0.28), 25)[24] == 7
    assert math.ceil(0.28 * 25) == 8
    assert counts.tolist() == [1] + [2] * 19 + [3] * 10 + [4] * 10 + [5] * 10 + [6] * 10


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=9), st.data())
def test_selection_is_the_best_set_with_its_forced_blocks(row, data):
    config = SketchWalkConfig.paper(
        sink_blocks=data.draw(st.integers(0, 3)), local_blocks=data.draw(st.integers(1, 3))
    )
    last = len(row) - 1
    forced = {
        j for j in range(last + 1) if j < config.sink_blocks or j > last - config.local_blocks
    }
    count = data.draw(st.integers(len(forced), last + 1))
    chosen = reference.select(np.array(row), np.array(row), count, config)
    assert chosen == sorted(set(chosen)) and len(chosen) == count and forced <= set(chosen)
    left = set(range(last + 1)) - set(chosen)
    for kept in set(chosen) - forced:
        assert all((row[kept], -kept) > (row[out], -out) for out in left)


def test_rows_without_a_positive_entry_fall_back_to_their_scores():
    config = SketchWalkConfig.paper()
    scores = np.array([-3.0, -1.0, -2.0, -9.0])
    assert reference.select(np.zeros(4), scores, 3, config) == [0, 1, 3]


def test_token_mask_and_density_count_pairs():
    rows = [[0], [0, 1], [0, 2]]
    mask = reference.token_mask(rows, 40, 16)
    pairs = {(t, s) for t in range(40) for s in range(t + 1) if s // 16 in rows[t // 16]}
    assert {(int(t), int(s)) for t, s in np.argwhere(mask)} == pairs
    dense = reference.token_mask(None, 40, 16)
    assert reference.measured_density([mask, dense]) == (len(pairs) + 820) / 1640


def test_decode_at_the_end_of_a_constant_block_equals_the_prefill_row():
    # With equal queries in the last block, its mean is the last token's query.
    config = SketchWalkConfig.paper(block_size=16, dense_layers=1, density=0.4)
    layers = cases.draw_layers(6, num_layers=4, num_tokens=150)
    for query in layers.queries:
        query[144:] = query[149]
    args = (layers.queries, layers.keys, layers.values, config)
    prefilled = reference.sketchwalk_prefill(*args)
    decoded = reference.sketchwalk_decode(*args, position=149)
    for one, many in zip(decoded, prefilled, strict=True):
        assert one.rows is None or one.rows[0] == many.rows[-1]
        np.testing.assert_allclose(one.output[0], many.output[-1], **tolerance("paths"))


def test_full_density_of_the_reference_is_dense():
    config = SketchWalkConfig.paper(block_size=16, density=1.0)
    layers = cases.draw_layers(7, num_layers=3, num_tokens=70)
    for layer in reference.sketchwalk_prefill(layers.queries, layers.keys, layers.values, config):
        np.testing.assert_array_equal(layer.mask, np.tri(70, dtype=bool))
