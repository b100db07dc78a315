"""The results file: rows are written, continued, refused and read."""

import dataclasses
import json

import numpy as np
import pytest
import quality_rows
import tiny
from evaluation_samples import samples

from sketchwalk_jax.evaluation.provenance import hash_sources
from sketchwalk_jax.evaluation.results import (
    Results,
    ResultsFile,
    check_rows,
    read_results,
    write_results,
)
from sketchwalk_jax.evaluation.rows import ROW_FIELDS, Outcome, Probed, group_key_of, make_rows
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.inference.cache import Density

LAYERS = 4


def _outcome(count: int, *, is_right=None, losses=None) -> Outcome:
    """Makes an outcome; pairs differ by prompt, and each layer attends to one pair less."""
    causal = np.arange(10.0, 10 + count)
    pairs = causal[None] - np.arange(LAYERS)[:, None]
    return Outcome(is_right, losses, Density(pairs, causal, pairs / 2, causal))


def test_row_has_every_field_and_densities_of_its_phase():
    outcome = _outcome(3, is_right=np.array([True, False, True]))
    (row,) = make_rows(
        outcome,
        samples("multi_key"),
        Rule("sketchwalk", "damped", 0.2),
        phase="both",
        tokens=512,
        dense_layers=(0, 1),
        probe=Probed([0.5, 0.7], [0.2, 0.4], (3000.0, 3000.0, 100.5)),
    )
    assert tuple(row) == ROW_FIELDS
    check_rows([row])
    assert row["is_right"] == [1, 0, 1] and row["prompts"] == 3
    assert row["exact"] == pytest.approx(2 / 3, abs=1e-5)
    assert row["exact_low"] < row["exact"] < row["exact_high"]
    assert row["mass_recall"] == 0.6
    assert row["mass_recall_by_layer"] == [None, None, 0.5, 0.7]
    assert row["output_error_by_layer"] == [None, None, 0.2, 0.4]
    assert row["dense_layers"] == 2 and row["decode_bytes_metadata"] == 100.5
    assert row["decode_bytes_keys"] == row["decode_bytes_values"] == 3000
    pairs = 33 - 3 * np.arange(LAYERS)  # all prompts, by layer
    for name, first in (("sparse", 2), ("all", 0)):
        expected = 1.5 * pairs[first:].sum() / (2 * 33 * (LAYERS - first))
        assert row[f"measured_density_{name}_layers"] == pytest.approx(expected, abs=1e-5)


def test_densities_count_the_sparse_phase_alone():
    outcome = _outcome(3, losses=np.array([1.0, 2.0, 6.0]))
    densities = {}
    options = {"tokens": 512, "dense_layers": (0, 1, 2)}
    for phase in ("prefill", "decode", "both"):
        given = outcome, samples("text_loss"), Rule("streaming", None, 0.2)
        (row,) = make_rows(*given, phase=phase, **options)
        densities[phase] = row["measured_density_sparse_layers"]
        assert (row["exact"], row["text_loss"]) == (None, 3.0)
        assert row["text_losses"] == [1.0, 2.0, 6.0]
    assert densities["decode"] == pytest.approx(densities["prefill"] / 2, abs=1e-5)
    assert densities["both"] == pytest.approx(0.75 * densities["prefill"], abs=1e-5)


def test_dense_rows_have_density_one():
    causal = _outcome(3).density.prefill_causal
    ones = np.broadcast_to(causal, (LAYERS, 3))
    outcome = Outcome(np.ones(3, bool), None, Density(ones, causal, 0 * ones, 0 * causal))
    options = {"phase": "both", "tokens": 512, "dense_layers": ()}
    (row,) = make_rows(outcome, samples("multi_key"), DENSE, **options)
    assert row["density"] == row["measured_density_sparse_layers"] == 1
    assert row["measured_density_all_layers"] == 1 and row["mass_recall_by_layer"] is None
    assert row["dense_layers"] is row["decode_bytes_keys"] is None


def test_needles_have_rows_by_depth_and_variables_by_hops():
    outcome = _outcome(4, is_right=np.array([True, False, True, True]))
    options = {"phase": "both", "tokens": 512, "dense_layers": (0, 1)}
    options["probe"] = Probed([1.0], [0.0])

    def rows_of(task, field, values):
        some = zip(samples(task, 4), values, strict=True)
        some = [dataclasses.replace(one, **{field: value}) for one, value in some]
        return make_rows(outcome, some, Rule("streaming", None, 0.2), **options)

    rows = rows_of("single_needle", "depth", (0.1, 0.9, 0.1, 0.9))
    assert [(row["depth"], row["exact"], row["prompts"]) for row in rows] == [
        (None, 0.75, 4),
        (0.1, 1.0, 2),
        (0.9, 0.5, 2),
    ]
    assert [row["is_right"] for row in rows] == [[1, 0, 1, 1], None, None]
    assert [row["mass_recall"] for row in rows] == [1.0, None, None]
    rows = rows_of("variable_tracking", "hops", (2, 3, 2, 3))
    assert [(row["hops"], row["is_right"]) for row in rows] == [(2, [1, 1]), (3, [0, 1])]


def test_batches_join_prompt_by_prompt():
    parts = [_outcome(2, is_right=np.array([True, False])), _outcome(1, is_right=np.array([True]))]
    joined = Outcome.join(parts)
    assert joined.is_right.tolist() == [True, False, True] and joined.losses is None
    np.testing.assert_array_equal(joined.density.decode_causal, [10, 11, 10])
    assert joined.density.prefill_pairs.shape == (LAYERS, 3)


@pytest.mark.unchecked
def test_file_of_another_evaluation_is_refused(tmp_path):
    path = tmp_path / "quality.json"
    meta = {"seed": 0, "dtype": "float32", "wall_s": 1.0, "date": "2026-01-01"}
    row = dict.fromkeys(ROW_FIELDS)
    write_results(path, meta, [row])
    now = {"seed": 1, "dtype": "float32", "wall_s": 0.0, "date": "2026-01-02"}
    with pytest.raises(ValueError, match=r"got seed 0 there, 1 now; pass --overwrite"):
        ResultsFile(path, now)
    assert ResultsFile(path, now, overwrite=True).rows == []
    file = ResultsFile(path, meta | {"date": "2026-01-02"})
    assert file.rows == [row] and file.has(group_key_of(row))
    path.write_text("{}")
    with pytest.raises(ValueError, match="must hold results of an evaluation; pass --overwrite"):
        ResultsFile(path, meta)


def test_rows_are_continued_with_the_plan_they_were_measured_with(tmp_path):
    meta = {"seed": 0, "wall_s": 1.0}
    plan = tiny.plan((0.1, 0.2), (1.0, 0.5))
    other = tiny.plan((0.1, 0.2), (1.0, 0.4))
    path = tmp_path / "quality.json"
    for was in (None, plan):
        settings = None if was is None else {"plan": was.short_hash}
        row = dict.fromkeys(ROW_FIELDS) | {"policy": "sketchwalk", "preset": "recommended"}
        write_results(path, meta, [row | {"settings": settings}])
        file = ResultsFile(path, meta)
        for now in (None, plan, other):
            rule = Rule("sketchwalk", "recommended", 0.2).with_plan(now)
            if now == was:
                file.check_plan(rule)
            else:
                with pytest.raises(ValueError, match="with the model's plan of now"):
                    file.check_plan(rule)


def read(meta, rows) -> Results:
    return Results(meta=meta, rows=tuple(rows))


@pytest.mark.unchecked
@pytest.mark.parametrize("was", ["aaaa", None])
def test_results_of_other_code_are_refused_or_marked(tmp_path, was):
    path = tmp_path / "quality.json"
    meta, row = {"seed": 0, "wall_s": 1.0, "sources": was}, dict.fromkeys(ROW_FIELDS)
    write_results(path, {name: one for name, one in meta.items() if one is not None}, [row])
    now = meta | {"sources": "bbbb"}
    there = '"aaaa"' if was else "unknown code"
    with pytest.raises(ValueError, match=f'now, "bbbb", got those of {there}; .*--other-code'):
        ResultsFile(path, now)
    file = ResultsFile(path, now, other_code=True)
    file.add([row | {"task": "b"}, row | {"task": "c"}])
    found = json.loads(path.read_text())
    assert found["meta"].get("sources") == was
    assert [one.get("sources") for one in found["rows"]] == [None, "bbbb", "bbbb"]
    assert read(found["meta"], found["rows"]).sources == {was or "unknown": 1, "bbbb": 2}
    # Rows of the same code as the file do not name it.
    file = ResultsFile(tmp_path / "new.json", now)
    file.add([row])
    assert "sources" not in file.rows[0] and read(file.meta, file.rows).sources == {"bbbb": 1}


def test_the_code_is_hashed(tmp_path, monkeypatch):
    from sketchwalk_jax.evaluation import provenance

    first = hash_sources()
    assert len(first) == 16 and provenance.describe_machine(["x"])["sources"] == first
    files = {}
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "evaluation").mkdir(parents=True)
        (folder / "evaluation" / "results.py").write_text("one")
        monkeypatch.setattr(provenance, "__file__", str(folder / "evaluation" / "results.py"))
        files[folder] = provenance.hash_sources.__wrapped__()
    assert len({*files.values()}) == 1 and first not in files.values()
    (tmp_path / "b" / "walk.py").write_text("two")
    assert provenance.hash_sources.__wrapped__() != files[tmp_path / "b"]


RULES = [
    {"policy": policy, "preset": None, "variant": None, "density": density, "phases": phases}
    for policy, density, phases in (
        ("dense", 1.0, ["both"]),
        ("streaming", 0.2, ["prefill", "decode"]),
    )
]
ASKED = {"tokens": [512], "tasks": ["multi_key", "long_decode"], "rules": RULES}


def row_of(policy, phase, task):
    density = 1.0 if policy == "dense" else 0.2
    own = {"policy": policy, "phase": phase, "task": task, "tokens": 512, "density": density}
    return dict.fromkeys(ROW_FIELDS) | own


def test_what_an_evaluation_lacks_is_what_was_asked_for_and_can_be_measured():
    rows = [row_of("dense", "both", "multi_key"), row_of("streaming", "decode", "multi_key")]

    def lacks(more=(), **meta):
        found = read({"asked": [ASKED], **meta}, (*rows, *more))
        assert found.asked >= len(found.missing)
        return [(one["policy"], one["phase"], one["task"]) for one in found.missing]

    streaming = [("streaming", "prefill", "multi_key"), ("streaming", "decode", "long_decode")]
    assert lacks() == [streaming[0], ("dense", "both", "long_decode"), streaming[1]]
    whole = [row_of(*one) for one in (*streaming, ("dense", "both", "long_decode"))]
    assert lacks(whole) == []  # long_decode is not sparse in prefill
    other = {"tokens": 512, "answered": "000"}
    assert lacks(whole[1:], drawn=[other | {"task": "multi_key"}]) == []
    assert lacks(whole[1:], drawn=[other | {"task": "multi_key", "answered": "010"}]) != []
    beyond = RULES[1] | {"tokens": 512, "phases": ["prefill"]}
    assert lacks(whole[1:], not_run=[beyond]) == []
    assert lacks(whole[1:], not_run=[beyond | {"density": 0.1}]) == streaming[:1]
    # Each model of a file has its own requested rows; old files name none.
    assert len(lacks(whole, asked=[ASKED, ASKED | {"model": "b", "stage": "report"}])) == 5
    assert read({}, rows).missing == () and read({}, rows).asked == 0


def test_rows_add_up_over_runs_and_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "quality.json"
    first = dict.fromkeys(ROW_FIELDS) | {"task": "a"}
    file = ResultsFile(path, {"seed": 0})
    file.add([first])
    before = path.read_bytes()
    assert json.loads(before)["rows"] == [first]
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.add([first | {"text_loss": float("nan")}])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    again = ResultsFile(path, {"seed": 0})
    again.add([first | {"task": "b"}])
    assert [row["task"] for row in json.loads(path.read_text())["rows"]] == ["a", "b"]
    assert again.meta["wall_s"] >= json.loads(before)["meta"]["wall_s"]
    with pytest.raises(FileNotFoundError):
        ResultsFile(tmp_path / "nowhere" / "quality.json", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.clear(), "rows must hold at least one row"),
        (lambda rows: rows[3].pop("hops"), r"row 3 without \['hops'\]"),
        (lambda rows: rows.append(dict(rows[0])), "rows must differ"),
    ],
)
def test_broken_rows_are_refused(change, message):
    rows = quality_rows.make_rows(lengths=(4096,), prompts=10)
    change(rows)
    with pytest.raises(ValueError, match=message):
        check_rows(rows)


ASKED_IN_VAIN = (5, [5], [{}], [ASKED | {"tokens": [[]]}], [ASKED | {"tokens": [*range(10**6)]}])


@pytest.mark.parametrize(
    ("content", "message"),
    [(text, r"x\.json|rows") for text in ("{", "[]", '{"rows": []}', '{"meta": {}, "rows": []}')]
    + [
        ({"asked": asked}, "x.json must say what was asked for as `sketchwalk eval`")
        for asked in ASKED_IN_VAIN
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path, content, message):
    file = tmp_path / "x.json"
    if isinstance(content, str):
        file.write_text(content)
    else:
        write_results(file, content, quality_rows.make_rows()[:2])
    with pytest.raises(ValueError, match=message):
        read_results(file)
