"""The benchmarks of the recommended policy: its parts, and where the blocks of answers rank."""

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from quality_rows import META

from sketchwalk_jax.evaluation.results import write_results
from sketchwalk_jax.evaluation.rows import ROW_FIELDS, exact_match
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.block_codes import round_queries
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import recommended_parts  # noqa: E402
import report  # noqa: E402
import retrieval  # noqa: E402

SIZE, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 16, 150, 4, 2, 16
PLAN = tiny.plan((0.1, 0.5), (0.9, 0.1), (0.01, 0.005), (0.5, 0.2), (0.02, 0.01))
MODEL = dataclasses.replace(tiny.MODEL, plan=PLAN)


# Parts.


def rules(*densities):
    return recommended_parts.find_rules(None, "tiny", Namespace(density=densities), MODEL)


def test_one_thing_is_changed_at_a_time_and_every_policy_can_be_made():
    found = rules(0.1, 0.2)
    names = [(rule.density, rule.policy, rule.variant) for rule in found]
    assert len(set(names)) == len(names)
    for rule in found:
        made = rule.with_plan(PLAN).make()
        assert made.density == rule.density
        if rule.policy == "sketchwalk":
            assert (made.plan is None) == (rule.variant == recommended_parts.NO_PLAN)
    prompts_only = {rule.variant for rule in found if rule.phases == ("prefill",)}
    assert "representatives=16" in prompts_only and "decay=0.0" not in prompts_only


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(SystemExit, match="must have a plan"):
        recommended_parts.find_rules(None, "tiny", Namespace(density=[0.1]), tiny.MODEL)


def select(config):
    """The state of one layer, for a prompt of random numbers."""
    rng = np.random.default_rng(0)
    draw = [rng.normal(size=(1, 160, heads, HEAD_DIM)) for heads in (HEADS, KV_HEADS)]
    query, key = (jnp.asarray(x, jnp.float32) for x in draw)
    lengths = jnp.array([TOKENS], jnp.int32)
    valid = jnp.arange(160)[None] < TOKENS
    span = Span(jnp.zeros(1, jnp.int32), valid, lengths, lengths)
    walk = config.init_walk(batch=1, num_rows=10, num_blocks=10)
    layer = jnp.zeros((), jnp.int32)
    shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM)

    @jax.jit
    def run(walk):
        kept = config.init_statistics(shape, batch=1, num_blocks=10)
        kept = config.observe(query, key, kept, span=span)
        return config.select(query, key[None], kept, walk, layer=layer, span=span)[1]

    walk = run(walk)
    return np.asarray(query[0]), np.asarray(key[0]), np.asarray(walk.scores[0])


@pytest.mark.slow
def test_means_of_neighbours_stand_for_a_row():
    config = recommended_parts.MeansConfig(block_size=SIZE, representatives=4)
    query = select(config)[0]
    padded = jnp.asarray(query[None])
    valid = jnp.arange(160)[None] < TOKENS
    found = np.asarray(config.represent(padded, valid, 4))[0]
    query = query[..., config.channels(HEAD_DIM)]
    assert found.shape == (10, 4, HEADS, HEAD_DIM // 2)
    np.testing.assert_allclose(found[2, 1], query[36:40].mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[9, 1], query[148:150].mean(axis=0), rtol=1e-5, atol=1e-6)
    assert (found[9, 2:] == 0).all()


@pytest.mark.parametrize(("shape", "width"), [("spread", 0.5), ("box", 1.0)])
def test_pages_score_by_their_bound(shape, width):
    config = recommended_parts.PagesConfig(
        block_size=SIZE, representatives=1, keys_of_page=4, shape=shape, width=width, exponent=1
    )
    query, key, scores = select(config)
    row = 5
    own = query[row * SIZE : (row + 1) * SIZE].mean(axis=0)
    shares = np.zeros(row + 1)
    for head in range(HEADS):
        pages = key[: (row + 1) * SIZE, head // 2].reshape(row + 1, 4, 4, HEAD_DIM)
        if shape == "spread":
            centre, radius = pages.mean(axis=2), pages.std(axis=2)
        else:
            low, high = pages.min(axis=2), pages.max(axis=2)
            centre, radius = (low + high) / 2, (high - low) / 2
        both = np.concatenate([own[head], width * np.abs(own[head])])
        both = np.asarray(round_queries(jnp.asarray(both)))
        bound = centre @ both[:HEAD_DIM] + radius @ both[HEAD_DIM:]
        peaks = bound.max(axis=1) / HEAD_DIM**0.5
        weights = np.exp(peaks - peaks.max())
        shares += weights / weights.sum()
    np.testing.assert_allclose(scores[row, : row + 1], shares, rtol=1e-4)


def test_exact_keys_are_those_that_were_given():
    config = recommended_parts.ExactConfig(block_size=SIZE, representatives=SIZE, exponent=8)
    shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM)
    key = select(config)[1][None]
    lengths = jnp.array([TOKENS], jnp.int32)
    valid = jnp.arange(160)[None] < TOKENS
    span = Span(jnp.zeros(1, jnp.int32), valid, lengths, lengths)
    kept = config.init_statistics(shape, batch=1, num_blocks=10)
    kept = config.observe(jnp.asarray(key), jnp.asarray(key), kept, span=span)
    found = np.asarray(kept.residual(jnp.asarray(0), 10, jnp.float32))
    wanted = key[0, :, :, config.channels(HEAD_DIM)].transpose(1, 2, 0)
    np.testing.assert_array_equal(found[0, :TOKENS], wanted[:TOKENS])
    assert (found[0, TOKENS:] == 0).all()


def test_the_table_sets_every_change_beside_the_policy_itself(tmp_path):
    found = [("dense", None, None, 1.0), ("sketchwalk", "recommended_blocks", None, 0.2)]
    found.append(("sketchwalk", "recommended_blocks", "decay=0.0", 0.2))
    rows = []
    for right, (policy, preset, variant, density) in zip((40, 36, 30), found, strict=True):
        row = dict.fromkeys(ROW_FIELDS) | {"policy": policy, "preset": preset, "variant": variant}
        row |= {"density": density, "phase": "both" if policy == "dense" else "prefill"}
        row |= {"model": "tiny", "tokens": 8192, "task": "multi_key", "prompts": 40}
        rows.append(row | exact_match(np.arange(40) < right))
    write_results(tmp_path / "recommended_parts.json", META, rows)
    lines = report.TABLES["recommended-parts"](tmp_path).splitlines()
    assert lines[0] == "**tiny, 8,192 tokens** (prompts: one of many keys 40)"
    cells = {line.split(" | ")[0]: line.split(" | ")[1] for line in lines if line.startswith("| ")}
    assert cells["| `recommended_blocks`"].startswith("−0.10 (")
    assert cells["| `decay=0.0`"].startswith("−0.15 (")


# Retrieval.


def test_the_answer_is_found_where_it_stands_once():
    def sample(*tokens):
        answer = np.array([7, 8, 9, 1], np.int32)  # and a full stop
        return Sample("single_needle", np.array(tokens, np.int32), len(tokens), answer, 8, "789.")

    assert retrieval.find(sample(1, 2, 3, 7, 8, 9, 4, 5, 7, 8, 9)) == 3
    assert retrieval.find(sample(1, 2, 3, 7, 8, 4, 4, 5)) is None
    assert retrieval.find(sample(7, 8, 9, 2, 7, 8, 9, 4)) is None


def test_blocks_that_are_kept_in_any_case_rank_first():
    scores = np.array([0.0, 0.4, 0.9, 0.1, 0.0, 0.0])
    assert [retrieval._rank(scores, block) for block in (2, 1, 3)] == [4, 5, 6]


def test_layers_keep_what_the_plan_gives_them():
    policy = recommended_parts.BlocksConfig(plan=PLAN)
    found = retrieval.layer_budgets(policy, 0.3, 4, 256)
    shares = (found.sum(axis=1) - 128) / (256 * 256 / 2)
    assert shares == pytest.approx(
        recommended_parts.BlocksConfig(density=0.3, plan=PLAN).layer_densities, abs=0.02
    )


@pytest.mark.slow
def test_every_layer_that_looks_at_an_answer_is_asked(tmp_path, monkeypatch):
    checkpoints.write_checkpoint(
        tmp_path, tokenizer=True, num_hidden_layers=2, max_position_embeddings=2048
    )
    monkeypatch.setattr(retrieval, "LOOKED_AT", 0.0)
    out = tmp_path / "retrieval.json"
    arguments = ["--tokens", "2048", "--prompts", "2", "--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["retrieval.py", "--model", str(tmp_path), *arguments])
    retrieval.main()
    # Models of another seed or text are not added to the file.
    before = out.read_bytes()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seed", "3"])
    with pytest.raises(SystemExit, match="results of the same kind, got seed 0 there, 3 now"):
        retrieval.main()
    assert out.read_bytes() == before
    table = report.TABLES["retrieval"](tmp_path)
    assert "| `recommended_blocks` |" in table and "of 2 prompts" in table


def test_the_class_that_parts_are_changed_in_is_the_preset_of_blocks():
    own = dataclasses.asdict(recommended_parts.BlocksConfig())
    assert own == dataclasses.asdict(SketchWalkConfig.recommended_blocks())
