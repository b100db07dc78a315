"""The paper's tables on the rows of an evaluation, and as the paper prints them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from quality_rows import POLICIES, RIVALS, cells, make_rows

from sketchwalk_jax.evaluation.tables import pool, rows_with

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import report  # noqa: E402
from report import bytes_read, comparison_table  # noqa: E402

ROWS = make_rows(policies=POLICIES | RIVALS, has_bytes=True)
METHOD = ["`paper`", "`damped`", "`one_hop`", "`released`"]
IN_PHASE = {
    "prefill": ["dense", "`minference`", "`flexprefill`", *METHOD],
    "decode": ["dense", "`quest`", "`adamas`", *METHOD],
    "both": ["dense", *METHOD],
}
READ = "MiB read per token, 16,384 tokens: keys and values + metadata"


def scored(label, phase, **where):
    rows = rows_with(ROWS, label=label, phase=phase, density=0.1, **where)
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


def comparison_blocks(rows):
    """The text before the tables, then titles and tables."""
    return report.comparison(SimpleNamespace(rows=rows)).split("\n\n")


def test_files_without_the_newer_fields_are_readable():
    rows = make_rows(policies=POLICIES | RIVALS, tasks=("multi_key",), lengths=(4096,))
    blocks = "".join(comparison_blocks(rows))
    assert "Leading layers" not in blocks and "`quest`" in blocks
    line = cells(comparison_table(rows, phase="decode", density=0.2))["`adamas`"]
    assert line["Dense layers"] == "–" and READ.replace("16,384", "4,096") not in line


def test_which_layers_are_dense_is_said():
    first, *tables = comparison_blocks(ROWS)
    assert first.startswith(
        "Leading layers that stay dense: 0 in `minference`, `flexprefill`; 2 in"
    )
    assert len(tables) == 2 * 2 * 3
    rows = [row for row in ROWS if row["tokens"] == 4096 and row["task"] == "multi_key"]
    rows = [row for row in rows if row["policy"] not in ("minference", "flexprefill")]
    assert comparison_blocks(rows)[0] == "Leading layers that stay dense: 2, whatever the policy."
    rows = make_rows(policies={("streaming", None): (0.5, 0.8, 0.0)}, lengths=(1024,))
    assert comparison_blocks(rows) == [report.NOT_MEASURED]
