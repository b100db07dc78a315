"""A report has a section and a figure for everything measured, and names what is missing."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from drawn import panels
from matplotlib import pyplot
from quality_rows import DENSE, META, POLICIES, RIVALS, make_results, make_rows, whole

from sketchwalk_jax.cli import main
from sketchwalk_jax.evaluation.report import (
    TITLES,
    drawings,
    find_answer,
    model_drawings,
    save_drawings,
    sections,
)
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.text.tokenizer import load_tokenizer

EVERYTHING = whole(policies=POLICIES | RIVALS, lengths=(4096,), prompts=20, has_bytes=True)


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def test_every_section_is_filled():
    found = sections(EVERYTHING)
    assert list(found) == list(TITLES)
    assert "Not measured" not in "".join(text for name, text in found.items() if name != "depths")
    assert "SHA-256" in found["setup"] and META["command"] in found["setup"]
    assert found["summary"].count("| dense |") == 2  # both densities


def test_fields_that_all_policies_share_are_said():
    results = whole(tasks=("multi_key",), lengths=(4096,), prompts=10)
    assert "In every policy" not in sections(results)["setup"]
    results.meta["fields"] = {"dense_layers": 2}
    assert "In every policy that has them: `dense_layers=2`." in sections(results)["setup"]


def test_files_without_the_newer_fields_are_readable():
    results = whole(policies=POLICIES | RIVALS, tasks=("multi_key",), lengths=(4096,))
    assert sections(results)["settings"] == "*No policy here takes calibration.*"


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": ("text_loss",)},
        {"tasks": ("multi_key",), "phases": ("decode",)},
        {"tasks": ("multi_key",), "phases": ("both",)},
        {"policies": {DENSE: (1.0, 1.0, 0.0)}},
        {"policies": {("sketchwalk", "released"): (0.6, 0.85, 0.02)}},
        {"policies": {("streaming", None): (0.6, 0.85, 0.02)}, "densities": (1.0,)},
    ],
)
def test_what_was_not_measured_is_said(options):
    results = whole(lengths=(1024,), prompts=10, **options)
    assert "*Not measured.*" in sections(results).values()
    parts = sections(results, plots=".")
    images = drawings(results.rows)
    linked = re.findall(r"!\[([^]]+)\]\(\./([^)]+)\.png\)", "".join(parts.values()))
    assert sorted(linked) == sorted((one.description, name) for name, one in images.items())
    for image in images.values():
        assert image.draw().axes


def test_only_what_was_measured_is_drawn():
    rows = make_rows(tasks=("multi_key", "text_loss"), phases=("decode",), lengths=(1024,))
    assert list(drawings(rows)) == ["accuracy_decode"]
    names = list(drawings(EVERYTHING.rows))
    assert names[:3] == ["accuracy_prefill", "accuracy_decode", "accuracy_both"]
    assert names[3:6] == ["needle_depth_prefill", "needle_depth_decode", "needle_depth_both"]
    assert names[6:] == ["mass_recall_prefill", "output_error_prefill"]


@pytest.fixture
def results_file(tmp_path) -> Path:
    file = tmp_path / "quality.json"
    tasks = ("single_needle", "text_loss")
    options = {"densities": (0.2,), "phases": ("prefill",), "prompts": 10}
    results = make_results(tasks=tasks, lengths=(1024,), **options)
    file.write_text(json.dumps(results), encoding="utf-8")
    return file


def test_command_writes_tables_and_figures(results_file, tmp_path, capsys):
    out = tmp_path / "new" / "report"
    assert main(["report", str(results_file), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"report.md", "accuracy_prefill.png", "needle_depth_prefill.png"} <= names
    assert {"mass_recall_prefill.png", "output_error_prefill.png"} <= names
    assert f"{out / 'report.md'}: tables and {len(names) - 1} figures" in capsys.readouterr().out
    text = (out / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^]]+\]\(\./([^)]+)\)", text)
    assert sorted(linked) == sorted(names - {"report.md"})
    assert all((out / name).stat().st_size > 1000 for name in linked)
    assert [f"## {title}" for title in TITLES.values()] == re.findall("^## .*", text, re.MULTILINE)


def ask(results: dict) -> None:
    """Adds to made-up results the list of requested rows: all of them, and one more policy."""
    groups = {(one["policy"], one["preset"], one["density"]): [] for one in results["rows"]}
    for one in results["rows"]:
        groups[one["policy"], one["preset"], one["density"]].append(one["phase"])
    names = ("policy", "preset", "density")
    rules = [
        dict(zip(names, rule, strict=True)) | {"variant": None, "phases": sorted(set(phases))}
        for rule, phases in groups.items()
    ]
    rules.append(rules[0] | {"policy": "quest", "density": 0.2, "phases": ["decode"]})
    tasks = ["single_needle", "text_loss"]
    results["meta"]["asked"] = [{"tokens": [1024], "tasks": tasks, "rules": rules}]


@pytest.mark.filterwarnings("always")
def test_an_unfinished_evaluation_and_one_of_two_codes_say_so(results_file, tmp_path, capsys):
    results = json.loads(results_file.read_text())
    ask(results)
    results["meta"]["sources"] = "aaaa"
    results["rows"][-1]["sources"] = "bbbb"
    count = len(results["rows"])
    results_file.write_text(json.dumps(results), encoding="utf-8")
    arguments = ["report", str(results_file), "--out", str(tmp_path / "out"), "--no-figures"]
    assert main(arguments) == 0
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert text.count("**Not finished.** 2 of ") == 3  # at the top, in setup and in summary
    assert "of quest 0.2; " in text and "sparse in decode; in single_needle, text_loss; at" in text
    codes = f"rows are {count - 1} of code `aaaa`, 1 of code `bbbb`."
    assert text.count(codes) == 3
    said = capsys.readouterr().err
    assert "warning: Not finished. 2 of " in said and codes in said

    del results["rows"][-1]["sources"]
    like = [row for row in results["rows"] if row["policy"] == "streaming"]
    results["rows"] += [row | {"policy": "quest", "phase": "decode"} for row in like]
    results_file.write_text(json.dumps(results), encoding="utf-8")
    assert main(arguments) == 0
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Not finished" not in text and "more than one code" not in text
    assert capsys.readouterr().err == ""


def test_two_files_make_no_report(results_file, capsys):
    assert main(["report", str(results_file), str(results_file)]) == 2
    assert "unexpected extra argument" in capsys.readouterr().err


def test_command_writes_tables_without_matplotlib(results_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["report", str(results_file), "--out", str(tmp_path / "report")]
    assert main(arguments) == 2
    assert "--no-figures must be given without matplotlib" in capsys.readouterr().err
    assert main([*arguments, "--no-figures"]) == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.md"]
    assert "![" not in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"FILE": "missing.json"}, 1, "missing.json: No such file"),
        ({"--out": "quality.json"}, 2, "--out must be a folder, got the file"),
        ({"--model": "model"}, 2, "--model must be the checkpoint that"),
        ({"--model": "model", "--no-figures": None}, 2, "--model must not be given together"),
    ],
)
def test_mistakes_on_the_command_line(
    results_file, tmp_path, monkeypatch, capsys, change, status, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    options = {"FILE": results_file.name, "--out": "report"} | change
    words = [options.pop("FILE")]
    for name, value in options.items():
        words += [name] if value is None else [name, value]
    assert main(["report", *words]) == status
    assert message in capsys.readouterr().err


def sample(tokens: list[int], answer: list[int], question: int) -> Sample:
    arrays = (np.array(one, np.int32) for one in (tokens, answer))
    tokens_, answer_ = arrays
    return Sample("single_needle", tokens_, len(tokens), answer_, question, "5.")


def test_the_answer_is_found_before_the_question_only():
    assert find_answer(sample([9, 5, 6, 7, 1, 5, 6], [5, 6, 0], 5)) == 1
    assert find_answer(sample([9, 9, 9, 9, 1, 5, 6], [5, 6, 0], 5)) is None
    assert find_answer(sample([9], [5, 6, 0], 1)) is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoints.write_checkpoint(
        directory, tokenizer=True, num_hidden_layers=4, max_position_embeddings=1024
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_a_checkpoint_is_drawn_reading_one_prompt(checkpoint, preset, tmp_path):
    params, model_config = load(checkpoint, dtype="float32")
    found = model_drawings(params, model_config, load_tokenizer(checkpoint), preset=preset)
    figure = found["block_map"].draw()
    assert f"preset {preset}, measured density 0." in figure.get_suptitle()
    for axis in figure.axes:
        (mark,) = axis.lines
        assert 0 < mark.get_xdata()[0] < 1024 // 64
    assert set(list(panels(figure))[0].split()[:2]) == {"layer", "2:"}
    paths = save_drawings(found, tmp_path)
    assert [path.name for path in paths] == ["block_map.png"]
