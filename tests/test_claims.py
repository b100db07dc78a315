"""Claims are judged by what the rows say, and stay open where these leave them open."""

import json
import sys
from pathlib import Path

import pytest
from quality_rows import DENSE, POLICIES, make_results, make_rows

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import report  # noqa: E402
from claims import check_claims  # noqa: E402


def verdicts(skills: dict[str, tuple[float, float, float]], **options) -> dict[str, str]:
    """What becomes of the claims if policies answer with these chances."""
    policies = {
        (name, None)
        if name in ("dense", "random", "oracle", "quest")
        else ("sketchwalk", name): one
        for name, one in skills.items()
    }
    rows = make_rows(policies=policies, lengths=(4096,), densities=(0.2,), prompts=100, **options)
    return {one.number: one.verdict for one in check_claims(rows)}


def test_claims_are_checked_by_what_the_rows_say():
    found = verdicts(
        {name: one for (_, preset), one in POLICIES.items() for name in [preset] if name}
        | {"dense": (1.0, 1.0, 0.0), "random": (0.5, 0.69, 0.05), "oracle": (1.0, 0.86, 0.0)}
    )
    assert found["P"] == "did not hold"
    assert found["1a"] == "held"
    assert found["1b"] == found["5b"] == found["6"] == "not tested"
    assert found["1c"] == "held"
    assert found["2a"] == found["2b"] == "held"


def test_claims_fail_where_the_rows_speak_against_them():
    sure = (20.0, 0.8, 0.0)  # right in every phase
    found = verdicts(
        {
            "dense": sure,
            "paper": (20.0, 0.9, 0.0),
            "damped": sure,
            "one_hop": (0.1, 0.8, 0.0),
            "oracle": sure,
            "random": (0.1, 0.7, 0.3),
            "released": sure,
            "quest": (0.1, 0.5, 0.0),
        }
    )
    assert found == {
        "P": "held",
        "1a": "did not hold",
        "1b": "not tested",
        "1c": "held",
        "2a": "did not hold",
        "2b": "not tested",
        "3": "did not hold",
        "4a": "held",
        "4b": "did not hold",
        "5a": "did not hold",
        "5b": "did not hold",
        "6": "not tested",
    }


def test_claims_about_policies_that_were_not_run_are_not_tested():
    found = verdicts({"dense": (1.0, 1.0, 0.0), "streaming": (0.2, 0.8, 0.1)})
    assert set(found.values()) == {"not tested"}


def test_a_dense_end_is_judged_by_where_the_question_stands():
    sure, unsure = (20.0, 0.8, 0.0), (0.1, 0.8, 0.0)
    policies = {DENSE: sure, ("sketchwalk", "released"): sure, ("sketchwalk", "one_hop"): sure}
    rows = make_rows(policies=policies, lengths=(4096,), densities=(0.2,), prompts=100)
    for row in rows:
        if row["task"] == "mid_prompt" and row["policy"] != "dense":
            row |= {"exact": 0.0, "is_right": [0] * 100}
    found = {one.number: one.verdict for one in check_claims(rows)}
    assert (found["4a"], found["4b"]) == ("did not hold", "held")
    found = verdicts({"dense": sure, "released": sure, "one_hop": unsure})
    assert found["4a"] == "held"


@pytest.mark.parametrize(
    ("damped", "one_hop", "verdict"),
    [(0.1, 0.9, "held"), (0.9, 0.1, "did not hold"), (0.5, 0.5, "undecided")],
)
def test_the_walk_is_judged_by_variable_tracking(damped, one_hop, verdict):
    found = verdicts({"damped": (damped, 0.8, 0.0), "one_hop": (one_hop, 0.8, 0.0)})
    assert found["3"] == verdict


def test_claims_stay_open_where_chance_may_explain_the_difference():
    found = verdicts({"dense": (0.97, 1.0, 0.0), "oracle": (0.90, 0.86, 0.0)})
    assert found["1c"] == "undecided"


@pytest.mark.parametrize(("skill", "verdict"), [(20.0, "held"), (0.05, "did not hold")])
def test_extremes_are_judged_where_they_select(skill, verdict):
    policies = {"dense": (20.0, 0.8, 0.0), "one_hop": (0.6, 0.8, 0.0), "quest": (skill, 0.8, 0.0)}
    found = verdicts(policies, phases=("decode",))
    assert (found["1b"], found["5b"]) == ("not tested", verdict)


@pytest.mark.parametrize(
    ("options", "has_method"),
    [
        ({"tasks": ("text_loss",)}, False),
        ({"policies": {DENSE: (1.0, 1.0, 0.0)}}, False),
        ({"policies": {("sketchwalk", "released"): (0.6, 0.85, 0.02)}}, True),
        ({"policies": {("streaming", None): (0.6, 0.85, 0.02)}, "densities": (1.0,)}, False),
    ],
)
def test_the_page_has_every_claim_of_whatever_was_measured(options, has_method, tmp_path):
    report.read_whole.cache_clear()
    (tmp_path / "quality.json").write_text(
        json.dumps(make_results(lengths=(1024,), prompts=10, **options))
    )
    text = report.TABLES["quality-claims"](tmp_path)
    assert text.count("\n- **") == 12 and text.startswith("A loss or gain is one if its 95 %")
    tables = report.TABLES["quality-comparison"](tmp_path)
    assert (tables == "*Not measured.*") != has_method
    without = report.TABLES["quality-claims"](tmp_path / "none")
    assert without.startswith("To measure: `sketchwalk eval")
