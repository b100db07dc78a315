"""The example of the policy guide runs unchanged, and is the policy that the guide describes."""

import cases
import guides
import numpy as np
import policy_runs
import pytest
import tiny
from tolerances import tolerance

import sketchwalk_jax as sw

SIZE, CAPACITY, NUM_LAYERS = 16, 160, 2
LENGTHS = (151, 64, 5)


@pytest.fixture(scope="module")
def page(repository):
    """The guide."""
    return repository / "sketchwalk_jax" / "policies" / "README.md"


@pytest.fixture(scope="module")
def policy(page, tmp_path_factory):
    """Loads the class of the example from a file of its own."""
    path = tmp_path_factory.mktemp("guide") / "key_sum.py"
    return guides.load_example(page, path).KeySumConfig


def slow_rows(query, key, config):
    """Returns the blocks of every row of one sequence and layer, and the smallest gap."""
    num_blocks = -(-len(query) // SIZE)
    group = query.shape[1] // key.shape[1]
    rows, gaps = [], []
    for row in range(num_blocks):
        scores = []
        for column in range(row + 1):
            keys = key[column * SIZE : (column + 1) * SIZE].astype(np.float64).sum(0)
            queries = query[row * SIZE : (row + 1) * SIZE].astype(np.float64).sum(0)
            scores.append(sum(q @ keys[head // group] for head, q in enumerate(queries)))
        forced = {0, row}
        count = min(row + 1, max(2, int(np.ceil(config.density * (row + 1) - 1e-9))))
        free = sorted(set(range(row + 1)) - forced, key=lambda j: -scores[j])
        room = count - len(forced)
        rows.append(sorted(forced | set(free[: max(0, room)])))
        if 0 < room < len(free):
            gaps.append(scores[free[room - 1]] - scores[free[room]])
    return rows, min(gaps, default=np.inf)


def test_the_example_selects_by_its_equation_whole_and_in_chunks(policy):
    config = policy(block_size=SIZE, density=0.4)

    def with_rows(seed):
        shape = {"block_size": SIZE, "heads": (4, 2), "num_layers": NUM_LAYERS}
        drawn = [
            cases.draw_layers(10 * seed + i, num_tokens=n, **shape) for i, n in enumerate(LENGTHS)
        ]
        found = [
            [slow_rows(x.queries[layer], x.keys[layer], config) for x in drawn]
            for layer in range(NUM_LAYERS)
        ]
        return drawn, found

    drawn, found = cases.first_usable(
        with_rows, lambda case: min(gap for layer in case[1] for _, gap in layer) > 1e-3
    )
    wanted = [[rows for rows, _ in layer] for layer in found]
    query, key = policy_runs.stack_sequences(drawn, CAPACITY)
    for chunk in (None, 5 * SIZE):
        rows, statistics = policy_runs.prefill_rows(
            config, query, key, LENGTHS, chunk=chunk, num_blocks=CAPACITY // SIZE
        )
        assert rows == wanted
    sums = np.asarray(statistics)
    np.testing.assert_allclose(sums[0, 2, 0], drawn[2].keys[0].sum(0), **tolerance("scores"))


@pytest.mark.slow
def test_the_example_generates(policy, page):
    params = tiny.params()
    tokens, lengths = tiny.prompts(200, 170)
    options = {"params": params, "tokens": tokens, "model_config": tiny.MODEL}
    scope = {"sw": sw, "KeySumConfig": policy, **options}
    exec(guides.block(page, "example-use"), scope)
    generation = scope["generation"]
    assert generation.tokens.shape == (2, 8)
    density = np.asarray(generation.measured_density.prefill)
    assert density[0] == 1.0 and np.all((density[1:] > 0.35) & (density[1:] < 0.6))
    options |= {"lengths": lengths, "max_new_tokens": 8}
    everything = policy(density=1.0, block_size=SIZE, dense_layers=1)
    dense = sw.generate(**options, policy=sw.Dense(block_size=SIZE))
    assert np.array_equal(sw.generate(**options, policy=everything).tokens, dense.tokens)
