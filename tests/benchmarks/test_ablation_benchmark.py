"""The ablations: which ones run, the one without a mask, the option `--reduced`, and their page."""

import dataclasses
import json
import sys
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quality_rows import META

from sketchwalk_jax.evaluation.results import read_results
from sketchwalk_jax.evaluation.rows import ROW_FIELDS, exact_match
from sketchwalk_jax.policies.base import LayerShape, Span

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablations  # noqa: E402
import tables  # noqa: E402

PROMPTS = 20
BATCH, BLOCKS, SIZE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 2, 10, 16, 4, 2, 16, 3
LENGTHS = np.array([BLOCKS * SIZE, 7 * SIZE - 5])
RIGHT = {"dense": 1.0, "random": 0.2, "paper": 0.3, "damped": 0.6}


def made_up_row(rule, phase, task, *, seed):
    right = RIGHT[rule.preset or rule.policy] - (0.1 if rule.variant == "exponent=4" else 0.0)
    row = dict.fromkeys(ROW_FIELDS) | rule.name_fields | {"phase": phase, "task": task}
    row |= {"tokens": 8192, "prompts": PROMPTS, "mass_recall": 0.7}
    row |= {"measured_density_sparse_layers": 0.2, "measured_density_all_layers": 0.33}
    if task != "text_loss":
        return row | exact_match(np.arange(PROMPTS) < PROMPTS * right)
    noise = np.random.default_rng(seed).normal(size=PROMPTS) / 100
    losses = 3.0 + 0.1 * (rule.policy != "dense") + noise
    return row | {"text_loss": float(losses.mean()), "text_losses": losses.tolist()}


@pytest.fixture(scope="module")
def rows():
    config = ablations.EvaluationConfig(
        policies=("sketchwalk", "random"),
        presets=ablations.PRESETS,
        densities=ablations.DENSITIES,
        variants=ablations.variants(),
    )
    return [
        made_up_row(rule, phase, task, seed=index)
        for index, rule in enumerate(config.rules())
        for phase in config.phases_of(rule.make())
        for task in ("single_needle", "multi_key", "text_loss")
    ]


def test_one_field_is_changed_at_a_time_and_every_rule_can_be_made():
    found = ablations.variants()
    assert len({str(rule) for rule in found}) == len(found)
    for rule in found:
        policy = rule.make()
        base = ablations.Rule("sketchwalk", rule.preset, ablations.DENSITY).make()
        changed = [name for name in vars(base) if getattr(policy, name) != getattr(base, name)]
        assert changed == [name for name, _ in rule.fields]
        assert len(changed) == (rule.variant != "no causal mask")
    names = {rule.variant.partition("=")[0] for rule in found}
    assert names == {"no causal mask", *(one for own in ablations.CHANGES.values() for one in own)}


def draw(seed, heads):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(BATCH, BLOCKS * SIZE, heads, HEAD_DIM)).astype(np.float32)


def select_in_layers(config, layers):
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    valid = jnp.arange(BLOCKS * SIZE)[None, :] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    walk = config.init_walk(batch=BATCH, num_rows=BLOCKS, num_blocks=BLOCKS)

    @jax.jit
    def select(query, key, walk):
        shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM)
        sums = config.init_statistics(shape, batch=BATCH, num_blocks=BLOCKS)
        sums = config.update_statistics(query, key, sums, span=span)
        return config.select(query, key[None], sums, walk, layer=jnp.int32(0), span=span)

    found = []
    for query, key in layers:
        selection, walk = select(query, key, walk)
        found.append(selection)
    return found


def lists_by_the_equations(config, layers, sequence):
    """Returns one sequence's lists in the last layer, in float64 without a mask on its inputs."""
    length = LENGTHS[sequence]
    count = -(-length // SIZE)
    state = None
    for query, key in layers:

        def means(x):
            x = x[sequence, :length].astype(np.float64).mean(axis=1)
            return np.array([x[j * SIZE : (j + 1) * SIZE].mean(axis=0) for j in range(count)])

        scores = means(query) @ means(key).T / np.sqrt(HEAD_DIM)
        if config.transition == "softmax":
            own = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            beta = 1.0 if config.beta is None else config.beta
            state = own if state is None else (1 - beta) * own + beta * state @ own
        else:
            own = scores**config.exponent
            state = own if state is None else state @ own
    lists = []
    for row in range(count):
        budget = min(row + 1, max(2, int(np.ceil(round(config.density * (row + 1), 9)))))
        ranked = state[row, : row + 1].copy()
        ranked[[0, row]] = np.inf
        lists.append(sorted(np.argsort(-ranked, kind="stable")[:budget].tolist()))
    return lists


@pytest.mark.parametrize("preset", ["paper", "damped"])
def test_lists_are_those_of_the_equations_without_a_mask(preset):
    """Later blocks take part, so the policy is for prefill only: decoding cannot go on with it."""
    rule = ablations.UnmaskedRule("sketchwalk", preset, 0.7)
    config = dataclasses.replace(rule.make(), block_size=SIZE, sketch_dim=None)
    assert config.phases == ("prefill",)
    layers = [(draw(2 * layer, HEADS), draw(2 * layer + 1, KV_HEADS)) for layer in range(LAYERS)]
    selection = jax.device_get(select_in_layers(config, layers)[-1])
    for sequence in range(BATCH):
        for row, wanted in enumerate(lists_by_the_equations(config, layers, sequence)):
            count = selection.counts[sequence, 0, row]
            assert selection.ids[sequence, 0, row, :count].tolist() == wanted


def test_tables_have_every_variant_with_paired_differences(rows, tmp_path):
    data = {"meta": META | {"prompts": PROMPTS, "sources": "new"}, "rows": rows}
    (tmp_path / "ablations.json").write_text(json.dumps(data), encoding="utf-8")
    text = "\n".join(
        tables.TABLES[f"ablations-{preset}"].write(tmp_path) for preset in ("paper", "damped")
    )
    for row in rows:
        if row["variant"] and "=" in row["variant"]:
            assert f"| `{row['variant']}` |" in text
    line = next(line for line in text.splitlines() if line.startswith("| `exponent=4` |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2].startswith("0.20 (") and cells[5].startswith("+0.1")
    line = next(line for line in text.splitlines() if line.startswith("| no causal mask |"))
    assert [cell.strip() for cell in line.split("|")][3:5] == ["–", "–"]  # prefill only


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, model = tmp_path / "ablations.json", tmp_path / "model"
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 1024}
    checkpoints.write_checkpoint(model, tokenizer=True, **sizes)
    few = ["--reduced", "--preset", "damped", "--phase", "prefill", "--probe-prompts", "0"]
    rows = []
    for variant, names in (
        ("walk_degree", {None, "walk_degree=2", "walk_degree=3"}),
        ("no causal mask", {"no causal mask"}),
    ):
        command = [*few, "--only", variant, "--model", str(model), "--out", str(path)]
        monkeypatch.setattr(sys, "argv", ["ablations.py", *command])
        ablations.main()
        before, rows = rows, list(read_results(path).rows)
        assert rows[: len(before)] == before
        added = rows[len(before) :]
        assert {row["variant"] for row in added} == names
    assert all(0.1 < row["measured_density_sparse_layers"] < 0.3 for row in added)
