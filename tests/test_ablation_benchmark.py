"""The ablations: which are run, that they run anywhere with `--reduced`, and their page."""

import json

import numpy as np
import pytest
from quality_rows import META

from sketchwalk_jax.evaluation.rows import ROW_FIELDS, exact_match
from sketchwalk_jax.evaluation.summaries import read_results

PROMPTS = 20
RIGHT = {"dense": 1.0, "random": 0.2, "paper": 0.3, "damped": 0.6}


@pytest.fixture(scope="module")
def scripts(repository):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        import ablation_report
        import ablations

        yield ablations, ablation_report


def made_up_row(rule, phase, task, *, seed):
    label = rule.preset or rule.policy
    row = dict.fromkeys(ROW_FIELDS) | {"policy": rule.policy, "preset": rule.preset}
    row |= {"variant": rule.variant, "density": rule.density, "phase": phase, "task": task}
    row |= {"tokens": 8192, "prompts": PROMPTS, "mass_recall": 0.7}
    row |= {"measured_density_sparse_layers": 0.2, "measured_density_all_layers": 0.33}
    rng = np.random.default_rng(seed)
    if task == "text_loss":
        losses = 3.0 + 0.1 * (label != "dense") + rng.normal(size=PROMPTS) / 100
        return row | {"text_loss": float(losses.mean()), "text_losses": losses.tolist()}
    lost = 0.1 if rule.variant == "exponent=4" else 0.0
    return row | exact_match(np.arange(PROMPTS) < PROMPTS * (RIGHT[label] - lost))


@pytest.fixture(scope="module")
def rows(scripts):
    ablations, _ = scripts
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


def test_one_field_is_changed_at_a_time_and_every_rule_can_be_made(scripts):
    ablations, _ = scripts
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


def test_page_has_every_variant_with_paired_differences(run_benchmark, rows, tmp_path):
    data = {"meta": META | {"prompts": PROMPTS}, "rows": rows}
    (tmp_path / "ablations.json").write_text(json.dumps(data), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:ablations -->\n<!-- /benchmark -->\n", encoding="utf-8")
    where = ("--results", tmp_path, "--plots", tmp_path, "--page", page)
    run_benchmark("ablation_report.py", *where)
    text = page.read_text(encoding="utf-8")
    for preset in ("paper", "damped"):
        assert f"**`{preset}` with one thing changed, density 0.2**" in text
    for row in rows:
        if row["variant"] and "=" in row["variant"]:
            assert f"| `{row['variant']}` |" in text
    line = next(line for line in text.splitlines() if line.startswith("| `exponent=4` |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2].startswith("0.20 (") and cells[5].startswith("−0.10 (")
    line = next(line for line in text.splitlines() if line.startswith("| no causal mask |"))
    assert [cell.strip() for cell in line.split("|")][3:5] == ["–", "–"]  # prefill only
    assert "| `paper`, 0.05 |" in text and "single needle, one of many keys" in text
    assert (tmp_path / "ablations.png").stat().st_size > 10_000


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_goes_on_where_it_stopped(run_benchmark, tmp_path):
    path = tmp_path / "ablations.json"
    few = ("--reduced", "--preset", "damped", "--phase", "prefill", "--probe-prompts", 0)
    run_benchmark("ablations.py", *few, "--only", "walk_degree", "--out", path)
    first = read_results(path).rows
    assert {row["variant"] for row in first} == {None, "walk_degree=2", "walk_degree=3"}
    run_benchmark("ablations.py", *few, "--only", "no causal mask", "--out", path)
    rows = read_results(path).rows
    assert rows[: len(first)] == first
    added = rows[len(first) :]
    assert {row["variant"] for row in added} == {"no causal mask"}
    assert all(0.1 < row["measured_density_sparse_layers"] < 0.3 for row in added)
