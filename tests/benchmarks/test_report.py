"""Tables of the pages: the rows behind a line and a cell, and the text that they give."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import report  # noqa: E402
from report import NOTHING, OneOf, Table, loss_beyond, right, right_interval, timed  # noqa: E402
from tables import EXPERTS, TABLES, WEIGHTS  # noqa: E402

MACHINE = {"device": "NVIDIA H200", "cpu": "some", "cores": 2, "versions": {"jax": "0.1"}}
MACHINE |= {"sources": "new"}


@pytest.fixture
def write(tmp_path):
    """Writes rows to a file, and the table of them."""

    def make(rows, meta=None, **options):
        data = {"meta": MACHINE | {"date": "2026-01-01"} | (meta or {}), "rows": rows}
        (tmp_path / "some.json").write_text(json.dumps(data), encoding="utf-8")
        report.read.cache_clear()
        return Table(file="some.json", command="it", **options).write(tmp_path)

    return make


def whole_model(policy, seconds, tokens=1024, **more):
    row = {"tokens": tokens, "policy": policy, "preset": None, "density": 1.0, "error": None}
    if policy == "sketchwalk":
        row |= {"preset": "recommended", "density": 0.1}
    run = {"date": more.pop("date", "2026-01-02"), "sources": "new"}
    return row | {"seconds": {"median": seconds}, "run": run} | more


COLUMNS = {
    "Dense": ({"method": "dense"}, timed()),
    "Sparse": ({"method": "recommended"}, timed(method="dense", density=1.0)),
}


def test_a_sparse_time_stands_beside_the_fastest_dense_one(write):
    rows = [
        whole_model("dense", 12.0),
        whole_model("dense", 10.0, chunk_size=512, date="2026-01-03"),
        whole_model("sketchwalk", 4.0),
    ]
    table, about = write(rows, lines=("tokens",), columns=COLUMNS).split("\n\n")
    assert table.splitlines() == [
        "| Tokens | Dense | Sparse |",
        "| --- | ---: | ---: |",
        "| 1,024 | 10.0 s | 4.00 s, **2.50×** |",
    ]
    assert about == "NVIDIA H200; JAX 0.1; 2026-01-02 to 2026-01-03"


def test_lines_are_sorted_and_those_with_gaps_are_left_out(write):
    rows = [
        whole_model("dense", 1.0, tokens=16384),
        whole_model("sketchwalk", 1.0, tokens=16384),
        whole_model("dense", 1.0, tokens=2048),
        whole_model("sketchwalk", 1.0, tokens=2048),
        whole_model("dense", 1.0, tokens=4096),
        whole_model("dense", 1.0, tokens=8192, error="does not fit", needed_gib=143.2),
    ]
    options = {"lines": ("tokens",), "columns": COLUMNS}
    found = re.findall(r"^\| ([\d,]+) ", write(rows, **options), re.MULTILINE)
    assert found == ["2,048", "16,384"]
    text = write(rows, **options, has_gaps=True)
    assert f"| 4,096 | 1.00 s | {NOTHING} |" in text and "| needs 143 GiB |" in text
    assert write(rows[-2:], **options) == "To measure: `it`."


def test_results_that_are_not_there_name_their_command_and_quick_runs_make_no_table(
    write, tmp_path
):
    table = Table(file="none.json", command="it", lines=("tokens",), columns=COLUMNS)
    assert table.write(tmp_path) == "To measure: `it`."
    with pytest.raises(ValueError, match="must be of a whole run"):
        write([], {"is_quick": True}, lines=("tokens",), columns=COLUMNS)


def answered(policy, task, right_of, count=40, **more):
    """Makes a row of an evaluation."""
    row = {"policy": policy, "preset": None, "phase": "decode", "density": 0.2, "tokens": 1024}
    row |= {"task": task, "exact": right_of / count, "prompts": count, "depth": None}
    row |= {"is_right": [int(one < right_of) for one in range(count)], "model": "tiny"}
    return row | more


def test_answers_are_added_up_without_parts_losses_and_tasks_that_do_not_count(write):
    rows = [
        answered("dense", "single_needle", 40, phase="both", density=1.0),
        answered("quest", "single_needle", 30),
        answered("quest", "single_needle", 5, count=5, depth=0.5),
        answered("quest", "multi_key", 20),
        answered("quest", "multi_value", 0, in_mean=False),
        answered("quest", "text_loss", 0, exact=None),
    ]
    options = {"where": {"phase": "decode"}, "lines": ("method",)}
    text = write(rows, **options, columns={"Right": ({}, right), "Range": ({}, right_interval)})
    assert "| dense | 1.00 | 1.00 (0.91–1.00) |" in text  # for all phases and densities
    assert "| `quest` | 0.62 | 0.62 (0.52–0.72) |" in text


def test_results_are_of_one_version_of_the_code(write):
    """Rows of times name it in their run; rows of evaluations where it differs from the file's."""
    times = [whole_model("dense", 2.0), whole_model("sketchwalk", 1.0)]
    answers = [answered("dense", "multi_key", 40), answered("quest", "multi_key", 20)]
    for rows, text, options in (
        (times, "**2.00×**", {"lines": ("tokens",), "columns": COLUMNS}),
        (answers, "| `quest` | 0.50 |", {"lines": ("method",), "columns": {"": ({}, right)}}),
    ):
        assert text in write(rows, **options)
        # Any row counts, whether a table shows it or not.
        for other, seen in (("old", "'new', 'old'"), (None, "'None', 'new'")):
            own = answered("adamas", "multi_key", 40, sources=other)
            own |= {} if other else {"run": {"date": "2026-01-02"}}
            with pytest.raises(ValueError, match=rf"one version of the code, got \[{seen}\]"):
                write([*rows, own], **options)


def test_losses_are_compared_text_by_text(write):
    rng = np.random.default_rng(0)
    base = 3 + rng.normal(size=20)
    change = 0.1 + 0.01 * rng.normal(size=20)
    more = {"exact": None, "count": 20}
    rows = [
        answered("dense", "text_loss", 0, **more, text_losses=base.tolist(), text_loss=3.0),
        answered("quest", "text_loss", 0, **more, text_losses=(base + change).tolist()),
    ]
    columns = {"Loss": ({"task": "text_loss"}, loss_beyond(method="dense"))}
    line = write(rows, lines=("method",), columns=columns).splitlines()[2]
    half = 2.093 * change.std(ddof=1) / np.sqrt(20)
    low, high = (f"{change.mean() + sign * half:+.3f}" for sign in (-1, 1))
    assert line == f"| `quest` | {change.mean():+.3f} ({low} to {high}) |"


def test_experts_are_shown_as_shares_of_the_rates_and_beside_xla(tmp_path):
    prompt = {"rows": 4096, "routing": "random", "dtype": "bfloat16", "error": None}
    token = prompt | {"rows": 8, "fraction_of_copy_bandwidth": 0.5}
    rows = [
        prompt | {"form": "products", "ms": 0.5, "tflops": 600.4, "fraction_of_matmul": 0.85},
        prompt | {"form": "ragged_dot", "error": "MemoryError: does not fit"},
        prompt | {"form": "mixture", "ms": 2.0},
        prompt | {"form": "XLA", "ms": 9.0},
        *(token | {"dtype": name, "form": "mixture", "ms": 0.1} for name in WEIGHTS),
        *(token | {"dtype": name, "form": "XLA", "ms": 0.3} for name in WEIGHTS),
    ]
    data = {"meta": MACHINE | {"date": "2026-01-01"}, "rows": rows}
    (tmp_path / EXPERTS.file).write_text(json.dumps(data), encoding="utf-8")
    text = TABLES["kernels-experts"].write(tmp_path)
    products = "500 µs, 600 TFLOP/s, 85%"
    assert f"| random | 4,096 | {products} | {NOTHING} | 2.00 ms, **4.5×** |" in text
    cell = "100 µs, 50%, **3.0×**"
    text = TABLES["kernels-experts-tokens"].write(tmp_path)
    assert f"| 8 | {cell} | {cell} | {cell} |" in text


def test_one_of_several_values_is_any_of_them():
    rows = [{"tokens": tokens} for tokens in (1, 2, 3)]
    assert report.select(rows, {"tokens": OneOf(1, 3)}) == rows[::2]


def test_every_table_is_on_a_page_with_five_columns_at_most_and_its_script(repository):
    on_pages = {
        name: text
        for page in report.PAGES
        for _, name, text, _ in report.SECTION.findall(page.read_text(encoding="utf-8"))
    }
    assert on_pages.keys() == TABLES.keys()
    missing = {name for name, text in on_pages.items() if "To measure" in text}
    is_measured = (report.RESULTS / EXPERTS.file).exists()
    assert missing == (set() if is_measured else {"kernels-experts", "kernels-experts-tokens"})
    for name, table in TABLES.items():
        if isinstance(table, Table):
            assert len(table.lines) + len(table.columns) <= 5, name
            scripts = re.findall(r"python (\S+\.py)", table.command)
            assert all((repository / script).exists() for script in scripts), name
            assert scripts or table.command.startswith(("sketchwalk ", "arXiv:")), name
            is_listed = f"| `{table.command}` | [" in on_pages["commands"]
            assert is_listed != table.command.startswith("arXiv:"), name
