"""The recommended policy against the specification, and its budgets."""

import functools

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import policy_runs
import pytest
import specification
from hypothesis import given
from pairwise import pairwise
from specification import assert_same_pages
from variants import slow_unless

from sketchwalk_jax import SketchWalkConfig, algorithm
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.recommended import page_budget

SIZE, PAGE, NUM_LAYERS = 32, 16, 3
OPTIONS = {"block_size": SIZE, "density": 0.3, "min_tokens": 64}
EARLY = ((64, 16), (160, 12))
CONFIGS = {
    "whole blocks": SketchWalkConfig.recommended(
        **OPTIONS, page_size=SIZE, early_representatives=(), exponent=4
    ),
    "default": SketchWalkConfig.recommended(**(OPTIONS | {"early_representatives": EARLY})),
    "largest": SketchWalkConfig.recommended(
        **(OPTIONS | {"min_tokens": 32}), sink_tokens=32, local_tokens=0, early_representatives=()
    ),
    "forgetful": SketchWalkConfig.recommended(
        **OPTIONS, decay=0.0, exponent=1, representatives=1, early_representatives=()
    ),
    "planned": SketchWalkConfig.recommended(
        **OPTIONS,
        plan=Plan(
            densities=((0.1, 0.6),) * 3,
            errors=((0.9, 0.1), (0.1, 0.05), (0.5, 0.2)),
            weights=(1.0, 1.0, 1.0),
            representatives=(4, 8, 16),
            misses=((0.1, 0.1, 0.1), (0.1, 0.05, 0.04), (0.5, 0.1, 0.09)),
        ),
        early_representatives=((64, 8),),
    ),
    "all queries": SketchWalkConfig.recommended(
        **(OPTIONS | {"min_tokens": 1}), representatives=SIZE
    ),
}
# Heads, head_dim and tokens of each sequence.
SHAPES = {
    "ragged": ((4, 2), 16, (203, 1)),
    "wide heads": ((6, 2), 64, (160, 17)),
    "one block": ((4, 4), 16, (16, 5)),
}
HOSTILE = ("random", "equal", "equal keys", "nan", "inf", "huge")
KEPT = {("default", "ragged", "nan")}
CASES = {
    *KEPT,
    ("planned", "ragged", "random"),
    *pairwise(tuple(CONFIGS), tuple(SHAPES), HOSTILE),
    ("largest", "wide heads", "inf"),
    ("whole blocks", "ragged", "equal"),
    ("forgetful", "wide heads", "equal"),
    ("forgetful", "wide heads", "huge"),
    ("all queries", "one block", "equal keys"),
}


# Logits reach 16 and sum 32 products; see `test_algorithm`.
ROUNDING = 2e-5


def draw(shape, kind):
    """Draws layers of every sequence, with keys as values."""
    heads, head_dim, lengths = SHAPES[shape]
    drawn = []
    for seed, length in enumerate(lengths):
        layers = cases.draw_layers(
            seed, num_layers=NUM_LAYERS, num_tokens=length, heads=heads, head_dim=head_dim,
            spread=0.7,
        )  # fmt: skip
        queries, keys = (np.stack(x) for x in (layers.queries, layers.keys))
        place = length // 2
        if kind in ("equal", "equal keys"):
            keys[:] = keys[:, :1]
        if kind == "equal":
            queries[:] = queries[:, :1]
        if kind in ("nan", "inf"):
            keys[:, place] = queries[:, min(place + 1, length - 1)] = float(kind)
            keys[1, place // 2, 0, 3] = np.nan
        if kind == "huge":
            keys[:, place] *= np.float32(1e20)
        drawn.append(cases.Layers(queries, keys, keys))
    return drawn


def run(config, drawn, lengths):
    """Returns lists and walks of every layer, of prompts and then of their last tokens."""
    capacity, lengths = -(-max(lengths) // SIZE) * SIZE, np.array(lengths)
    query, key = policy_runs.stack_sequences(drawn, capacity, padding=np.nan)
    empty = policy_runs.empty_statistics(config, query, key, capacity // SIZE)
    prompts, before = (policy_runs.span_of(x, SIZE, 0, capacity) for x in (lengths, lengths - 1))
    prompt = policy_runs.run(query, key, empty, prompts, key, config=config)
    statistics, *_ = policy_runs.run(query, key, empty, before, key, config=config)
    new = policy_runs.tokens_at(lengths - 1, query, key)
    token = Span.of_tokens(jnp.asarray(lengths - 1, jnp.int32), SIZE)
    token = policy_runs.run(*new, statistics, token, key, config=config)
    return [
        (ids[:, :, 0], counts[:, :, 0], walk.scores)
        for _, ids, counts, walk in jax.device_get((prompt, token))
    ]


@pytest.mark.parametrize("case", slow_unless(KEPT.__contains__, sorted(CASES)), ids=":".join)
def test_prompts_and_tokens_select_as_the_specification(case):
    name, shape, kind = case
    config, lengths, drawn = CONFIGS[name], SHAPES[shape][2], draw(shape, kind)
    results = run(config, drawn, lengths)
    for place, layers in enumerate(drawn):
        walks = [
            specification.neutral_walk(config, lengths[place], is_token=x) for x in (False, True)
        ]
        for layer in range(NUM_LAYERS):
            numbers = config.sparse_representatives
            changes = {
                "density": config.for_layer(layer, NUM_LAYERS).layer_densities[layer],
                "representatives": numbers[min(layer, len(numbers) - 1)],
            }
            arrays = [jnp.asarray(x[layer]) for x in vars(layers).values()]
            for index, found in enumerate(results):
                specified = specification.layer(config, is_token=index == 1, **changes)
                _, walks[index], kept = specified(*arrays, walks[index])
                wanted = np.asarray(walks[index])
                num_rows, num_pages = wanted.shape
                ids, counts, walk = (x[layer, place] for x in found)
                np.testing.assert_allclose(
                    walk[:num_rows, :num_pages], wanted, rtol=ROUNDING, atol=1e-7
                )
                assert_same_pages(ids, counts, kept, wanted, ROUNDING)


def test_layers_differ_by_the_plan():
    config = CONFIGS["planned"]
    assert config.sparse_representatives == (4, 8, 8)
    assert len(set(config.layer_densities)) > 1
    few = SketchWalkConfig.recommended(**OPTIONS, plan=config.plan, representatives=2)
    assert few.sparse_representatives == (2, 2, 2)
    assert CONFIGS["default"].sparse_representatives == (8,)


@given(
    density=st.floats(0.01, 1.0),
    least=st.integers(1, 9),
    num_blocks=st.integers(1, 300),
    pages=st.sampled_from([1, 2, 4]),
)
def test_budgets_equal_their_definition_and_ignore_the_length_of_the_prompt(
    density, least, num_blocks, pages
):
    rule = {"density": density, "least": least, "pages": pages}
    counts = page_budget(num_blocks, **rule)
    rows = np.arange(num_blocks)
    np.testing.assert_array_equal(counts, algorithm.page_budget(rows, pages, density, least))
    np.testing.assert_array_equal(counts, page_budget(300, **rule)[:num_blocks])
    assert (counts >= np.minimum(least, pages * np.arange(1, num_blocks + 1))).all()
    assert (np.diff(counts) >= 0).all()


def test_a_token_at_the_end_of_a_constant_block_selects_as_the_row_of_the_prompt():
    # Every representative is the token's query: page scores differ only by a factor.
    config = SketchWalkConfig.recommended(**OPTIONS, local_tokens=0)
    length = 160
    layers = cases.draw_layers(3, num_layers=NUM_LAYERS, num_tokens=length, spread=0.7)
    for query in layers.queries:
        query[-SIZE:] = query[-1:]
    (ids, counts, _), (own, number, _) = run(config, [layers], [length])
    np.testing.assert_array_equal(counts[:, 0, -1], number[:, 0, 0])
    np.testing.assert_array_equal(ids[:, 0, -1], own[:, 0, 0])


def test_statistics_are_less_than_a_fourteenth_of_keys_and_values():
    shape, blocks = LayerShape(32, 8, 128, jnp.bfloat16), 2048
    policy = SketchWalkConfig.recommended()
    make = functools.partial(policy.init_statistics, shape, batch=1, num_blocks=blocks)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))
    assert held / (blocks * 64 * 2 * 8 * 128 * 2) == pytest.approx(35 / 512, rel=2e-3)


@pytest.mark.unchecked
def test_rows_and_tokens_keep_a_minimum_of_their_own():
    policy = SketchWalkConfig.recommended(density=0.1, min_tokens=(512, 1024))
    rows, tokens = policy.budgets(64)[0], policy.budgets(256, is_token=True)[0]
    assert rows[[0, 7, 8, 31]].tolist() == [4, 32, 32, 32] and rows[63] == 32
    assert tokens[[0, 63, 64, 255]].tolist() == [1, 64, 64, 64]
    assert SketchWalkConfig.recommended(min_tokens=64) == SketchWalkConfig.recommended(
        min_tokens=(64, 64)
    )
    for wrong in (0, (64,), (64, 0), (64, 64, 64), [64, 64], None, 1.5):
        with pytest.raises(ValueError, match="min_tokens must"):
            SketchWalkConfig.recommended(min_tokens=wrong)
