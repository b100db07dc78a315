"""Lists of policies without a state, and properties and errors that policies share."""

import dataclasses
import functools

import cases
import chex
import float64_mass
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import policy_runs
import pytest
import tiny
from hypothesis import given, settings
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import (
    Dense,
    SketchWalkConfig,
    dense_attention,
    generate,
    init_walk,
    sketchwalk_attention,
)
from sketchwalk_jax.policies import POLICIES, PRESETS, by_name, has_threshold, takes_density
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.policies.random_blocks import RandomConfig
from sketchwalk_jax.policies.streaming import StreamingConfig

SIZE, CAPACITY, NUM_LAYERS = 16, 320, 3
OPTIONS = {"block_size": SIZE, "dense_layers": 0, "density": 0.3}
NAMES = ("streaming", "random", "oracle", "recommended")
PHASES = ("prefill", "decode")
# In whole models, test one policy: they differ only in their lists.
slow = pytest.mark.slow
IN_A_MODEL = slow_unless("oracle".__eq__, NAMES[:3])
FORCED = {"default": {}, "wide": {"sink_blocks": 2, "local_blocks": 3}}


def named(name, **options):
    """Makes a policy by its name, or by the name of a preset of Sketch-and-Walk."""
    if name == "recommended":  # whose rows keep more than these prompts have
        options = {"min_tokens": 64} | options
    return (
        by_name("sketchwalk", preset=name, **options)
        if name in PRESETS
        else by_name(name, **options)
    )


def draw(*lengths, seed=0):
    """Draws queries and keys of sequences with these lengths, padded to the capacity."""
    shape = {"block_size": SIZE, "heads": (6, 2), "spread": 0.7}
    drawn = [
        cases.draw_layers(seed + row, num_layers=NUM_LAYERS, num_tokens=length, **shape)
        for row, length in enumerate(lengths)
    ]
    return drawn, *policy_runs.stack_sequences(drawn, CAPACITY)


def selected(config, query, key, lengths, **options):
    return policy_runs.prefill_rows(config, query, key, lengths, **options)[0]


@pytest.mark.parametrize("forced", FORCED)
def test_streaming_keeps_first_and_recent_blocks(forced):
    config = StreamingConfig(**OPTIONS, **FORCED[forced])
    _, query, key = draw(311)
    sink, counts = config.sink_blocks, config.budget(20)
    wanted = [
        sorted({*range(min(sink, row + 1)), *range(row + 1 - max(0, count - sink), row + 1)})
        for row, count in enumerate(counts.tolist())
    ]
    assert [len(row) for row in wanted] == counts.tolist()
    assert selected(config, query, key, [311]) == [[wanted]] * NUM_LAYERS


@pytest.mark.parametrize("forced", FORCED)
def test_random_fills_the_budget_evenly_and_differs_by_row_layer_and_seed(forced):
    config = RandomConfig(**OPTIONS, **FORCED[forced])
    _, query, key = draw(CAPACITY)
    sink, local = config.sink_blocks, config.local_blocks
    layers = selected(config, query, key, [CAPACITY])
    for (rows,) in layers:
        for row, (ids, count) in enumerate(zip(rows, config.budget(20).tolist(), strict=True)):
            forced_ids = {*range(min(sink, row + 1)), *range(max(0, row + 1 - local), row + 1)}
            assert len(set(ids)) == count and ids == sorted(ids) and forced_ids <= set(ids)
            assert max(ids) == row
    assert layers[0] != layers[1] != layers[2] != layers[0]
    others = selected(dataclasses.replace(config, seed=1), query, key, [CAPACITY])
    assert all(one != other for one, other in zip(layers, others, strict=True))


@pytest.mark.parametrize("forced", FORCED)
def test_random_favours_no_block(forced):
    config = RandomConfig(**OPTIONS, **FORCED[forced])
    nothing = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, CAPACITY, 1, 1)), None, None

    def last_row(layer):
        span = Span.of_tokens(jnp.array([CAPACITY - 1], jnp.int32), config.block_size)
        return config.select(*nothing, layer=layer, span=span)[0].ids[0, 0, 0]

    ids = jax.jit(jax.vmap(last_row))(jnp.arange(2000, dtype=jnp.int32))
    free = slice(config.sink_blocks, 20 - config.local_blocks)
    hits = np.bincount(np.asarray(ids).ravel(), minlength=20)[free]
    share = (config.budget(20)[-1] - config.sink_blocks - config.local_blocks) / len(hits)
    assert np.abs(hits - 2000 * share).max() < 4 * np.sqrt(2000 * share * (1 - share))


@pytest.mark.parametrize("aggregation", ["mass", "max"])
@pytest.mark.parametrize("forced", FORCED)
def test_oracle_keeps_the_heaviest_blocks(forced, aggregation):
    config = OracleConfig(**OPTIONS, **FORCED[forced], aggregation=aggregation)
    lengths = (311, 64, 1)
    forced_blocks = {"sink": config.sink_blocks, "local": config.local_blocks}

    def by_block(queries, keys):
        if aggregation == "mass":
            return float64_mass.block_mass(queries, keys, SIZE).sum(0)
        shares = np.zeros((-(-len(queries) // SIZE),) * 2)
        for token in range(len(queries)):
            one = float64_mass.block_mass(queries[[token]], keys[: token + 1], SIZE, first=token)
            row = token // SIZE
            shares[row, : row + 1] = np.maximum(shares[row, : row + 1], one[:, 0].max(0))
        return shares

    def with_lists(seed):
        drawn, query, key = draw(*lengths, seed=10 * seed)
        found = [
            [
                float64_mass.best_rows(
                    by_block(x.queries[layer], x.keys[layer]),
                    config.budget(-(-length // SIZE)),
                    **forced_blocks,
                )
                for x, length in zip(drawn, lengths, strict=True)
            ]
            for layer in range(NUM_LAYERS)
        ]
        return query, key, found

    query, key, found = cases.first_usable(
        with_lists, lambda drawn: min(gap for layer in drawn[2] for _, gap in layer) > 1e-5
    )
    wanted = [[rows for rows, _ in layer] for layer in found]
    assert selected(config, query, key, lengths) == wanted


@pytest.mark.slow
def test_no_policy_recalls_more_mass_than_the_oracle():
    lengths = (CAPACITY, 200)
    drawn, query, key = draw(*lengths)
    masses = [
        [float64_mass.block_mass(x.queries[layer], x.keys[layer], SIZE).sum(0) for x in drawn]
        for layer in range(NUM_LAYERS)
    ]

    def recalls(lists):
        return np.array(
            [
                mass[row, ids].sum() / mass[row].sum()
                for layer, rows_of in zip(masses, lists, strict=True)
                for mass, rows in zip(layer, rows_of, strict=True)
                for row, ids in enumerate(rows)
            ]
        )

    def best_of(config):
        """Returns the best lists of the policy's lengths."""
        forced = dict(zip(("sink", "local"), config.forced, strict=True))
        return [
            [float64_mass.best_rows(x, config.budget(len(x)), **forced)[0] for x in layer]
            for layer in masses
        ]

    oracle = OracleConfig(**OPTIONS)
    best = recalls(selected(oracle, query, key, lengths))
    np.testing.assert_allclose(best, recalls(best_of(oracle)), rtol=1e-5)
    others = [by_name(name, **OPTIONS) for name in ("streaming", "random")]
    others += [named(name, **OPTIONS) for name in PRESETS if name != "released"]
    for config in others:
        best, other = recalls(best_of(config)), recalls(selected(config, query, key, lengths))
        assert (other <= best + 1e-5).all() and other.mean() < best.mean()


@pytest.mark.parametrize("name", slow_unless("oracle".__eq__, NAMES))
@settings(max_examples=5)
@given(lengths=st.tuples(*[st.integers(1, CAPACITY)] * 3), chunk=st.sampled_from([16, 160]))
def test_chunks_padding_and_batch_change_nothing(name, lengths, chunk):
    config = named(name, **OPTIONS)
    drawn, query, key = draw(*lengths)
    whole = selected(config, query, key, lengths)
    assert selected(config, query, key, lengths, chunk=chunk) == whole
    assert selected(config, query, key, lengths, num_blocks=33) == whole
    for row in range(3):
        alone = selected(config, query[:, [row]], key[:, [row]], [lengths[row]])
        assert alone == [[layer[row]] for layer in whole]
    assert [len(rows) for rows in whole[0]] == [-(-length // SIZE) for length in lengths]


@pytest.mark.parametrize("name", slow_unless("recommended".__eq__, NAMES))
def test_full_density_lists_everything(name):
    config = named(name, **(OPTIONS | {"density": 1.0}))
    _, query, key = draw(200)
    everything = [list(range(row + 1)) for row in range(13)]
    assert selected(config, query, key, [200]) == [[everything]] * NUM_LAYERS


@pytest.mark.parametrize("name", NAMES[:3])
def test_decode_selects_for_the_row_of_its_token(name):
    config = named(name, **OPTIONS)
    lengths = (CAPACITY, CAPACITY, CAPACITY)
    drawn, query, key = draw(*lengths)
    prompt = selected(config, query, key, lengths)
    for positions in ([0, 15, 16], [17, 160, 319], [200, 255, 256]):
        new = policy_runs.tokens_at(positions, query, key)
        cache = np.array(key)
        for row, position in enumerate(positions):
            cache[:, row, position + 1 :] = np.nan
        rows, _ = policy_runs.decode_rows(config, *new, None, positions, cache)
        for layer in range(NUM_LAYERS):
            for row, position in enumerate(positions):
                block = position // SIZE
                if name == "oracle":
                    one = drawn[row]
                    mass = float64_mass.block_mass(
                        one.queries[layer][[position]],
                        one.keys[layer][: position + 1],
                        SIZE,
                        first=position,
                    ).sum(0)
                    (wanted,), gap = float64_mass.best_rows(
                        mass, config.budget(block + 1)[-1:], sink=1, local=1, first_row=block
                    )
                    assert gap > 1e-5
                else:
                    wanted = prompt[layer][row][block]
                assert rows[layer][row] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense_layers", "phase"),
    [
        ((1, 3), "both"),
        (1, "both"),
        (0, "both"),
        ((1, 3), "prefill"),
        (1, "decode"),
    ],
)
def test_the_recommended_policys_density_over_all_layers_is_nominal(dense_layers, phase):
    density, length, new = 0.6, 480, 24
    floors = {"sink_tokens": 0, "local_tokens": 0, "min_tokens": 16}
    config = SketchWalkConfig.recommended(
        block_size=32, density=density, dense_layers=dense_layers, **floors
    )
    tokens, _ = tiny.prompts(length)
    out = generate(
        tiny.params(),
        tokens,
        policy=config,
        model_config=tiny.MODEL,
        max_new_tokens=new,
        phase=phase,
    )
    measured = out.measured_density
    dense = dense_layers if isinstance(dense_layers, tuple) else range(dense_layers)
    for name in ("prefill", "decode"):
        by_layer = np.asarray(getattr(measured, name))
        for layer in range(tiny.MODEL.num_layers):
            is_dense = layer in dense or phase not in ("both", name)
            assert (by_layer[layer] == 1.0) == is_dense
        if phase in ("both", name):
            # The density of a decoded token has steps of one block in 30.
            slack = 0.01 if name == "prefill" else 0.5 / 30
            assert abs(by_layer.mean() - density) < slack
    if phase == "both":
        assert abs(float(measured.overall) - density) < 0.01


@pytest.mark.parametrize("name", IN_A_MODEL)
@pytest.mark.slow
@pytest.mark.parametrize("density", [0.1, 0.55])
def test_measured_density_is_within_one_block_per_row_of_nominal(name, density):
    config = named(name, block_size=SIZE, dense_layers=1, density=density)
    tokens, lengths = tiny.prompts(500, 471)
    out = generate(
        tiny.params(),
        tokens,
        lengths=lengths,
        policy=config,
        model_config=tiny.MODEL,
        max_new_tokens=8,
    )
    density_of = out.measured_density
    rows, causal = np.arange(1, 33), np.array([n * (n + 1) / 2 for n in lengths])
    asked = np.maximum(density * rows, 2)  # forced blocks may exceed the density
    nominal = density * causal.sum()
    slack = 2 * SIZE * SIZE * (len(rows) + (asked - density * rows).sum())
    pairs = np.asarray(density_of.prefill_pairs).sum(1)
    np.testing.assert_allclose(pairs[0], causal.sum(), **tolerance("density"))
    assert (np.abs(pairs[1:] - nominal) <= slack).all() and slack < 0.2 * causal.sum()
    decode = np.asarray(density_of.decode)
    np.testing.assert_allclose(decode[0], 1.0, **tolerance("density"))
    assert (np.abs(decode[1:] - density) < 1 / 31).all()


# Options with which a policy keeps a part of a prompt or of the cache, and all of it.
SOME_AND_ALL = {name: ({"density": 0.4}, {"density": 1.0}) for name in NAMES}
SOME_AND_ALL |= {name: ({"density": 0.3}, {"density": 1.0}) for name in ("quest", "adamas")}
SOME_AND_ALL["minference"] = {"scale": 0.0}, {"scale": 64.0}
SOME_AND_ALL["flexprefill"] = {"gamma": 0.3, "min_budget": 16}, {"gamma": 1.0, "min_budget": 16}
ONE_PHASE = ("quest", "adamas", "minference", "flexprefill")


@functools.cache
def generated(config, **options):
    tokens, lengths = tiny.prompts(400, 300)
    options |= {"lengths": lengths, "max_new_tokens": 6, "model_config": tiny.MODEL}
    return generate(tiny.params(), tokens, policy=config, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PHASE)
def test_generation_is_sparse_in_one_phase_and_dense_in_the_other(name):
    config = named(name, block_size=SIZE, dense_layers=1, **SOME_AND_ALL[name][0])
    (phase,) = config.phases
    out, dense = generated(config), generated(Dense(block_size=SIZE))
    by_phase = {one: np.asarray(getattr(out.measured_density, one)) for one in PHASES}
    sparse = by_phase.pop(phase)[1:]
    np.testing.assert_allclose(*by_phase.values(), 1.0, **tolerance("density"))
    if phase == "prefill":
        assert (sparse < 0.75).all()
    else:
        np.testing.assert_array_equal(out.tokens[:, 0], dense.tokens[:, 0])
        assert (np.abs(sparse - config.density) < config.unit_size / 300 + 1e-6).all()
        assert (sparse >= config.density - 1e-6).all() or config.unit_size > 1


@slow
@pytest.mark.parametrize("name", SOME_AND_ALL)
def test_generation_at_full_density_equals_dense_and_chunks_change_nothing(name):
    some, everything = (
        named(name, block_size=SIZE, dense_layers=1, **options) for options in SOME_AND_ALL[name]
    )
    out, dense = generated(everything), generated(Dense(block_size=SIZE))
    np.testing.assert_array_equal(out.tokens, dense.tokens)
    np.testing.assert_allclose(out.measured_density.overall, 1.0, **tolerance("density"))
    assert (out.cache.statistics is None) == (name not in ("recommended", "quest", "adamas"))
    if "decode" in some.phases:  # the others estimate a chunk from its own last queries
        np.testing.assert_array_equal(generated(some, chunk_size=64).tokens, generated(some).tokens)


# `test_prefill_decode` runs the recommended policy in a model, this test each in a layer.
@pytest.mark.parametrize(
    "name",
    slow_unless(["recommended", "quest"].__contains__, SOME_AND_ALL),
)
def test_one_layer_at_full_density_equals_dense(name):
    some, everything = SOME_AND_ALL[name]
    reads_densely = name in ("quest", "adamas")
    config = named(name, block_size=SIZE, **(some if reads_densely else everything))
    query, key = (jnp.asarray(x[0]) for x in draw(CAPACITY, 200)[1:])
    lengths, walk = jnp.array([CAPACITY, 200], jnp.int32), init_walk(2, CAPACITY, policy=config)
    out, after = sketchwalk_attention(query, key, key, walk, policy=config, lengths=lengths)
    wanted = dense_attention(query, key, key, kv_lengths=lengths)
    if reads_densely:
        np.testing.assert_array_equal(out, wanted)
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(out[row, :length], wanted[row, :length], **tolerance("paths"))
    if name != "recommended":
        chex.assert_trees_all_equal(after, walk)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ONE_PHASE)
def test_a_policy_is_refused_in_the_phase_in_which_it_does_not_select(name):
    config = named(name, block_size=SIZE)
    (own,) = config.phases
    (other,) = {*PHASES} - {own}
    with pytest.raises(ValueError, match=f"phase must be 'both' or '{own}' for .*, which selects"):
        generated(config, phase=other)
    tokens, lengths = 32 if other == "prefill" else 1, jnp.array([32], jnp.int32)
    span = Span(jnp.zeros_like(lengths), jnp.ones((1, tokens), bool), lengths, lengths)
    query, cache = jnp.zeros((1, tokens, 1, 16)), jnp.zeros((1, 1, 32, 1, 16))
    with pytest.raises(NotImplementedError, match=f"selects in {own} only"):
        config.select(query, cache, None, None, layer=jnp.int32(0), span=span)


def test_every_name_makes_its_policy():
    assert isinstance(by_name("dense"), Dense)
    assert by_name("dense", density=0.1) == Dense()
    assert by_name("streaming", density=0.1) == StreamingConfig(density=0.1)
    assert by_name("random", seed=3) == RandomConfig(seed=3)
    assert by_name("oracle", density=None) == OracleConfig()
    assert by_name("sketchwalk") == SketchWalkConfig.recommended()
    assert {by_name(name).dense_layers for name in POLICIES} == {0, 2}
    calibrated = {"minference", "flexprefill"}
    assert {name for name in POLICIES if has_threshold(by_name(name))} == calibrated
    takers = {name for name in POLICIES if takes_density(by_name(name))}
    assert takers == set(POLICIES) - calibrated - {"dense"}
    takers = [takes_density(by_name("sketchwalk", preset=preset)) for preset in PRESETS]
    assert takers == [preset != "released" for preset in PRESETS]
    for name in POLICIES:
        assert hash(by_name(name)) == hash(by_name(name))  # static under jit


def test_defaults_are_the_published_ones():
    published = {"block_size": 64, "dense_layers": 0, "phases": ("prefill",)}
    lines = {"vertical": 512, "slash": 2048, "scale": 1.0}
    blocks = {"top_blocks": 100, "sink_tokens": 100, "local_tokens": 800}
    budgets = {"gamma": 0.9, "tau": 0.1, "min_budget": 512, "max_budget": None}
    for name, fields in (("minference", lines | blocks), ("flexprefill", budgets)):
        found = {field: getattr(by_name(name), field) for field in published | fields}
        assert found == published | fields


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kascade", {}, "policy must be one of"),
        ("streaming", {"preset": "paper"}, "preset must be None for the streaming policy"),
        ("dense", {"preset": "paper"}, "preset must be None for the dense policy"),
        ("sketchwalk", {"preset": "best"}, "preset must be one of"),
        ("sketchwalk", {"preset": "paper", "exponent": 99}, "exponent must be at most .*, got 99"),
        (
            "sketchwalk",
            {"preset": "paper", "transition": "relu_power", "beta": 0.5},
            "beta must be None or 0 unless transition is 'softmax'",
        ),
        *[
            ("sketchwalk", {"preset": "recommended", **fields}, message)
            for fields, message in (
                ({"page_size": 24}, "page_size must be a power of two, got 24"),
                ({"exponent": 99}, "exponent must be at most .*, got 99"),
                ({"representatives": 65}, "at most the 64 queries of a block, got 65"),
                ({"min_tokens": (1, 2, 3)}, "min_tokens must have 2 numbers"),
                ({"layer_representatives": 8}, "layer_representatives must be a tuple, got 8"),
                ({"num_layers": 3, "plan": tiny.plan((0.1, 0.6), (0.5, 0.1))}, "of a model with 3"),
            )
        ],
        ("oracle", {"seed": 1}, "oracle must be given fields that it has"),
        ("oracle", {"density": 0.0}, "density must be in"),
        ("minference", {"density": 0.2}, "density must be None for minference, .* set scale, or"),
        ("streaming", {"density": float("nan")}, "density must be in"),
        ("random", {"sink_blocks": -1}, "sink_blocks must be an integer of at least 0"),
        ("random", {"local_blocks": 0}, "local_blocks must be a positive integer"),
        ("random", {"seed": 2**32}, "seed must be an integer from 0"),
        ("random", {"seed": True}, "seed must be an integer from 0"),
        ("oracle", {"block_size": 24}, "block_size must be a power of two"),
        ("quest", {"block_size": 8}, "block_size must be a power of two of at least 16"),
        ("quest", {"density": 0.0}, "density must be in"),
        ("quest", {"token_budget": 0}, "token_budget must be None or a positive integer, got 0"),
        ("quest", {"token_budget": True}, "token_budget must be None or a .* integer, got True"),
        ("quest", {"force_current": 1}, "force_current must be True or False, got 1"),
        ("quest", {"dense_layers": -1}, "dense_layers must be an integer of at least 0"),
        ("quest", {"sink_blocks": 1}, "must be given fields that it has"),
        *[("quest", {"min_pages": x}, "min_pages must be a positive") for x in (0, 1.5, True)],
        *[
            ("adamas", {"thresholds": x}, "thresholds must be three ascending finite numbers, got")
            for x in ((0.0, 0.0, 1.0), (1.0, 0.0, -1.0), (0.0, 1.0), (0.0, 1.0, np.inf), 3, "abc")
        ],
        ("minference", {"pattern": "slash"}, "pattern must be one of"),
        ("minference", {"vertical": 0}, "vertical must be a positive integer, got 0"),
        ("minference", {"slash": 2.5}, "slash must be a positive integer"),
        ("minference", {"scale": -1.0}, r"scale must be in \[0, inf\), got -1.0"),
        ("minference", {"scale": float("nan")}, r"scale must be in \[0, inf\), got nan"),
        ("flexprefill", {"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ("flexprefill", {"gamma": float("nan")}, r"gamma must be in \[0, 1\]"),
        ("flexprefill", {"tau": -0.1}, r"tau must be in \[0, inf\), got -0.1"),
        ("flexprefill", {"min_budget": 0}, "min_budget must be a positive integer, got 0"),
        ("flexprefill", {"max_budget": 0}, "max_budget must be None or a positive integer, got 0"),
    ],
)
def test_wrong_names_and_fields_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        by_name(name, **options)
