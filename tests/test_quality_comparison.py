"""The paper's tables on the rows of an evaluation, and what calibration set."""

import json
import re

import numpy as np
import pytest
from quality_rows import LONGEST, POLICIES, RIVALS, make_results, make_rows
from test_quality_report import cells, verdicts, whole

from sketchwalk_jax.evaluation.comparison import (
    bytes_read,
    comparison,
    comparison_table,
    settings_table,
)
from sketchwalk_jax.evaluation.report import TITLES, sections
from sketchwalk_jax.evaluation.summaries import pool, read_results, select
from sketchwalk_jax.evaluation.tables import (
    accuracy_table,
    lengths_table,
    loss_table,
    recall_table,
    summary_table,
)

ROWS = make_rows(policies=POLICIES | RIVALS, has_bytes=True)
METHOD = ["`paper`", "`damped`", "`one_hop`", "`released`"]
IN_PHASE = {
    "prefill": ["dense", "`minference`", "`flexprefill`", *METHOD],
    "decode": ["dense", "`quest`", "`adamas`", *METHOD],
    "both": ["dense", *METHOD],
}
READ = "MiB read per token, 16,384 tokens: keys and values + metadata"


def is_gap(text):
    """Whether a dash stands for a value; those of intervals stand between digits."""
    return re.search(r"(?<!\d)–", text) is not None


def scored(label, phase, **where):
    rows = select(ROWS, label=label, phase=phase, density=0.1, **where)
    return [row for row in rows if row["exact"] is not None]


@pytest.mark.parametrize("phase", IN_PHASE)
def test_a_phase_has_its_rivals_and_every_preset(phase):
    found = cells(comparison_table(ROWS, phase=phase, density=0.1))
    assert list(found) == IN_PHASE[phase]
    for name, line in found.items():
        assert "–" not in "".join(line.values()).replace("0–", "").replace("–0", "").replace(
            "–1", ""
        )
        label = name.strip("`")
        by_length = [pool(scored(label, phase, tokens=tokens)) for tokens in (4096, 8192, 16384)]
        for title, one in zip(("4,096 tokens", "8,192 tokens"), by_length, strict=False):
            assert line[title].startswith(f"{one.exact:.2f} ({one.low:.2f}–")
        mean = np.mean([one.exact for one in by_length])
        assert float(line["Average"].split()[0]) == pytest.approx(mean, abs=0.006)
    layers = {name: line["Dense layers"] for name, line in found.items()}
    assert layers["dense"] == "all" and layers["`paper`"] == "2"
    assert layers.get("`minference`", "0") == "0"


def test_protocols_part_the_tasks():
    line = cells(comparison_table(ROWS, phase="decode", density=0.1))["`quest`"]
    decoded = pool(
        row
        for task in ("variable_tracking", "mid_prompt")
        for row in scored("quest", "decode", task=task)
    )
    assert line["B: question decoded"].startswith(f"{decoded.exact:.2f} (")
    counts = pool(scored("quest", "decode")).prompts, decoded.prompts
    read = (pool(scored("quest", "decode")).exact * counts[0] - decoded.exact * counts[1]) / (
        counts[0] - counts[1]
    )
    assert float(line["A: question read"].split()[0]) == pytest.approx(read, abs=0.006)
    assert "A: question read" not in comparison_table(ROWS, phase="prefill", density=0.1)


def test_bytes_are_added_up_and_compared_with_dense():
    dense = [{"prompts": 2, **dict.fromkeys(FIELDS, 2.0**20)} | {FIELDS[2]: 0.0}]
    some = [
        {"prompts": 2, FIELDS[0]: 2**19, FIELDS[1]: 2**19, FIELDS[2]: 2**18},
        {"prompts": 2, FIELDS[0]: 2**20, FIELDS[1]: 2**20, FIELDS[2]: 2**18},
    ]
    assert bytes_read(some, dense) == "1.50 + 0.25 (0.88)"
    assert bytes_read([{"prompts": 1}], dense) == bytes_read(some, [{"prompts": 1}]) == "–"
    lines = cells(comparison_table(ROWS, phase="decode", density=0.1))
    assert lines["dense"][READ].endswith("+ 0.00 (1.00)")
    assert lines["`quest`"][READ].endswith(f"({2.125 / 2 * (2 + 10 * 0.1) / 12:.2f})")


FIELDS = [f"decode_bytes_{name}" for name in ("keys", "values", "metadata")]


def test_files_without_the_newer_fields_are_readable(tmp_path):
    path = tmp_path / "quality.json"
    path.write_text(json.dumps(make_results(policies=POLICIES | RIVALS, lengths=(4096,))))
    results = read_results(path)
    parts = sections(results)
    assert "Leading layers" not in parts["comparison"] and "`quest`" in parts["comparison"]
    assert parts["settings"] == "*No policy here takes calibration.*"
    line = cells(comparison_table(results.rows, phase="decode", density=0.2))["`adamas`"]
    assert line["Dense layers"] == line[READ.replace("16,384", "4,096")] == "–"


def test_which_layers_are_dense_is_said():
    first = comparison(ROWS, (0.2, 0.1))[0]
    assert first.startswith(
        "Leading layers that stay dense: 0 in `minference`, `flexprefill`; 2 in"
    )
    assert len(comparison(ROWS, (0.2, 0.1))) == 1 + 2 * 2 * 3
    rows = [row for row in ROWS if row["policy"] not in ("minference", "flexprefill")]
    assert comparison(rows, (0.2,))[0] == "Leading layers that stay dense: 2, whatever the policy."
    rows = make_rows(policies={("streaming", None): (0.5, 0.8, 0.0)}, lengths=(1024,))
    assert comparison(rows, (0.2,)) == []


def test_what_calibration_set_is_listed():
    lines = [line.split(" | ") for line in settings_table(ROWS).splitlines()[2:]]
    assert len(lines) == 3 * 2 * 3  # policies, densities, lengths
    assert lines[0][:5] == ["| `minference`", "prefill", "0.2", "4,096", "`scale` 0.2266"]
    assert lines[6][4] == "`gamma` 0.5, `min_budget` 128"
    assert lines[-1][4] == "`thresholds` (-1.25, 0.03125, 1.25)"
    (row, *_) = select(ROWS, label="minference", tokens=4096, density=0.2)
    value = f"{row['measured_density_sparse_layers']:.3f}"
    assert lines[0][5] == f"{value} ({value}–{value}) |"


def test_policies_of_one_phase_have_rows_there_alone():
    summary = cells(summary_table(ROWS, density=0.2, tokens=LONGEST))
    quest, paper = summary["`quest`"], summary["`paper`"]
    assert quest["Prefill"] == quest["Prefill and decode"] == "–" != quest["Decode"]
    loss = pool(select(ROWS, label="quest", task="text_loss", tokens=LONGEST, density=0.2))
    assert quest["Text loss"] == f"{loss.text_loss:.3f}"
    assert quest["Density: sparse / all layers"] == paper["Density: sparse / all layers"]
    for table in (
        lengths_table(ROWS, density=0.2),
        loss_table(ROWS, densities=(0.2, 0.1), tokens=LONGEST),
        recall_table(ROWS, densities=(0.2, 0.1), tokens=LONGEST),
    ):
        assert not is_gap(table)
        phases = {line.split(" | ")[1] for line in table.splitlines() if "`minference`" in line}
        assert phases == {"Prefill"}
    assert "`quest`" not in accuracy_table(ROWS, phase="prefill", density=0.2, tokens=LONGEST)


def test_every_section_is_filled_with_all_policies():
    found = sections(whole(policies=POLICIES | RIVALS, lengths=(4096,), has_bytes=True))
    assert list(found) == list(TITLES)
    assert "Not measured" not in "".join(text for name, text in found.items() if name != "depths")


def test_fields_that_all_policies_share_are_said():
    results = whole(lengths=(4096,), prompts=10)
    assert "In every policy" not in sections(results)["setup"]
    results.meta["fields"] = {"dense_layers": 2}
    assert "In every policy that has them: `dense_layers=2`." in sections(results)["setup"]


@pytest.mark.parametrize(("skill", "verdict"), [(20.0, "held"), (0.05, "did not hold")])
def test_extremes_are_judged_where_they_select(skill, verdict):
    policies = {"dense": (20.0, 0.8, 0.0), "one_hop": (0.6, 0.8, 0.0), "quest": (skill, 0.8, 0.0)}
    found = verdicts(policies, phases=("decode",))
    assert (found["1b"], found["5b"]) == ("not tested", verdict)
