"""Plans: how layers share a density, the plan's file, and the checkpoint that it belongs to."""

import dataclasses
import json
from pathlib import Path

import checkpoints
import chex
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import tiny
from gguf_checkpoints import write_gguf
from hypothesis import given

from sketchwalk_jax import Auto, SketchWalkConfig, generate, make_generate, stream
from sketchwalk_jax.evaluation.calibrated_rules import fit_density
from sketchwalk_jax.models import ModelConfig, load, save
from sketchwalk_jax.models.plans import find_plan
from sketchwalk_jax.models.weights import fingerprint
from sketchwalk_jax.plan import (
    PHASES,
    TEXT_MARGIN,
    TYPICAL_LOSSES,
    Loss,
    Plan,
    least_densities,
    plan_path,
)
from sketchwalk_jax.policies import by_name, changed_fields, with_plan
from sketchwalk_jax.policies.recommended import page_budget

# The first layer needs most, the second nothing; the third's errors are not convex.
PLAN = Plan(
    densities=((0.1, 0.3, 0.6), (0.1, 0.3, 0.6), (0.1, 0.3, 0.6)),
    errors=((0.4, 0.15, 0.05), (0.01, 0.005, 0.001), (0.8, 0.78, 0.04)),
    weights=(2.0, 1.0, 0.5),
    representatives=(4, 8, 16),
    misses=((0.4, 0.2, 0.19), (0.1, 0.1, 0.1), (0.3, 0.31, 0.01)),
)
LOSSES = tuple(
    Loss(phase, tokens, density, density, kl / 2, kl, 0.9)
    for phase, tokens, curve in (
        ("prefill", 1024, {0.1: 0.5, 0.2: 0.09, 0.4: 0.01}),
        ("prefill", 2048, {0.1: 0.03, 0.2: 0.02, 0.4: 0.001}),
        ("decode", 1024, {0.1: 0.02, 0.2: 0.03, 0.4: 0.01}),  # not falling: 0.1 is luck
    )
    for density, kl in curve.items()
)
KNOWN = dataclasses.replace(PLAN, model_losses=LOSSES)
TWO_LAYERS = tiny.plan((0.1, 0.5), (0.5, 0.1), (0.02, 0.01))
MEASURED = {"prompts": 2}


# Densities.


def test_the_mean_of_the_layers_is_the_density_and_no_layer_gets_less_of_a_larger_one():
    densities = np.linspace(0.01, 1, 60)
    shared = np.array([PLAN.share_density(density) for density in densities])
    np.testing.assert_allclose(shared.mean(axis=1), densities, atol=1e-4)
    assert (0 < shared).all() and (shared <= 1).all()
    assert (np.diff(shared, axis=0) >= -1.01e-4).all()


def test_no_layer_gets_less_than_was_measured_while_all_can_have_that():
    assert PLAN.share_density(0.12) == pytest.approx((0.16, 0.1, 0.1))
    assert PLAN.share_density(0.06) == pytest.approx((0.06, 0.06, 0.06))


def test_what_is_measured_between_the_hull_does_not_count():
    without = dataclasses.replace(
        PLAN,
        densities=((0.1, 0.3, 0.6), (0.1, 0.3, 0.6), (0.1, 0.6)),
        errors=(*PLAN.errors[:2], (0.8, 0.04)),
    )
    for density in (0.05, 0.15, 0.25, 0.4):
        assert PLAN.share_density(density) == without.share_density(density)


def test_no_other_densities_of_the_same_mean_lose_less():
    rng = np.random.default_rng(0)

    def loss(given):
        hulls = [([0.1, 0.3, 0.6, 1], [0.8, 0.3, 0.1, 0])]
        hulls += [([0.1, 0.3, 0.6, 1], [0.01, 0.005, 0.001, 0]), ([0.1, 0.6, 1], [0.4, 0.02, 0])]
        return sum(np.interp(x, *hull) for x, hull in zip(given, hulls, strict=True))

    best = loss(PLAN.share_density(0.4))
    for _ in range(500):
        other = rng.uniform(0.1, 1, 3)
        other *= 1.2 / other.sum()
        if other.min() >= 0.1 and other.max() <= 1:
            assert loss(other) >= best - 1e-3


# Representatives.


def test_representatives_go_where_they_lose_least():
    share = PLAN.share_representatives
    assert share(4) == (4, 4, 4)
    assert share(5) == (4, 4, 4)  # too few for a second piece
    assert share(6) == (8, 4, 4)  # gains 0.2 for 4, against 0.29 for 12
    assert share(10) == (8, 4, 16)
    assert share(16) == (16, 4, 16)  # no more where it gains nothing
    assert share(3) == (3, 3, 3) and share(20) == (20, 20, 20)


@given(mean=st.integers(4, 16))
def test_no_more_representatives_are_given_than_there_are(mean):
    found = PLAN.share_representatives(mean)
    assert sum(found) <= 3 * mean and set(found) <= {4, 8, 16}


def test_some_layers_of_a_plan():
    part = PLAN.of_layers([2, 0])
    assert part.num_layers == 2 and part.densities == (PLAN.densities[2], PLAN.densities[0])
    assert part.losses == (PLAN.losses[2], PLAN.losses[0])
    assert part.losses[1] == pytest.approx((0.8, 0.3, 0.1))
    assert part.representatives == PLAN.representatives


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"densities": ()}, "must have an entry for each layer"),
        ({"errors": ()}, "must have an entry for each layer"),
        ({"weights": ()}, "must have an entry for each layer"),
        ({"misses": ()}, "must have an entry for each layer"),
        ({"densities": ((0.1, 0.1),)}, "must be ascending"),
        ({"errors": ((1.0,),)}, "with one error each"),
        ({"densities": ((),), "errors": ((),)}, "must be ascending"),
        ({"densities": ((0.0, 0.2),)}, r"must be in \(0, 1\)"),
        ({"densities": ((0.5, 1.0),)}, r"must be in \(0, 1\)"),
        ({"errors": ((-1.0, 0.5),)}, "errors must be finite and not negative"),
        ({"errors": ((float("nan"), 0.5),)}, "errors must be finite and not negative"),
        ({"weights": (-1.0,)}, "weights must be finite and not negative"),
        ({"representatives": (8, 8)}, "representatives must be ascending"),
        ({"representatives": (0, 8)}, "representatives must be ascending and positive"),
        ({"misses": ((1.0,),)}, "one for each of"),
        ({"misses": ((1.0, float("inf")),)}, "misses must be finite"),
    ],
)
@pytest.mark.unchecked
def test_numbers_that_are_no_plan_are_refused(fields, message):
    one = {"densities": ((0.1, 0.2),), "errors": ((1.0, 0.5),), "weights": (1.0,)}
    one |= {"representatives": (4, 8), "misses": ((1.0, 1.0),)}
    Plan(**one)
    with pytest.raises(ValueError, match=message):
        Plan(**(one | fields))


# The file.


def test_a_plan_comes_back_from_its_file(tmp_path):
    path = tmp_path / "plan.json"
    plan = dataclasses.replace(KNOWN, fingerprint="ab" * 32)
    plan.write(path, measured=MEASURED)
    assert Plan.read(path) == plan
    assert json.loads(path.read_text())["measured"] == MEASURED
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    path.write_text(damaged())  # written before models' losses were measured
    assert Plan.read(path).model_losses == ()


def test_plans_of_the_same_numbers_have_one_short_hash():
    other = dataclasses.replace(PLAN, fingerprint="ab" * 32)
    assert PLAN.short_hash == other.short_hash != TWO_LAYERS.short_hash
    assert len(PLAN.short_hash) == 12


LOSS = {"phase": "decode", "tokens": 8, "density": 0.1, "kept": 0.2}
LOSS |= {"kl": 0.1, "most": 0.1, "same": 1.0}


def damaged(**entries):
    content = {"format_version": 1, "fingerprint": "", "densities": [[0.1]], "errors": [[1.0]]}
    content |= {"weights": [1.0], "representatives": [8], "misses": [[1.0]]}
    content |= entries
    return json.dumps({name: value for name, value in content.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a plan that `sketchwalk calibrate` wrote"),
        ("[]", "must be a plan that"),
        ("null", "must be a plan that"),
        ('{"format_version": 1, "dens', "must be a plan that"),
        (damaged(errors=...), "must be a plan that"),
        (damaged(weights=...), "must be a plan that"),
        (damaged(densities=[0.1]), "must be a plan that"),
        (damaged(densities=[["a"]]), "must be a plan that"),
        (damaged(format_version=2), "a newer sketchwalk_jax may read it"),
        (damaged(densities=[[2.0]]), r"must be in \(0, 1\)"),
        (damaged(model_losses=[{}]), "must be a plan that"),
        (damaged(model_losses=3), "must be a plan that"),
        (damaged(model_losses=[LOSS | {"density": 0}]), "a loss must have"),
        (damaged(model_losses=[LOSS | {"phase": "both"}]), "a loss must have"),
        (damaged(model_losses=[LOSS | {"most": float("nan")}]), "a loss must have"),
        (damaged(model_losses=[LOSS | {"kl": "0.1"}]), "a loss must have"),
    ],
)
@pytest.mark.unchecked
def test_damaged_files_are_named(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        Plan.read(path)
    assert str(path) in str(raised.value)


# The checkpoint of a plan.


def make_checkpoint(kind: str, folder: Path) -> Path:
    """Writes a tiny checkpoint of two layers."""
    if kind == "gguf":
        write_gguf(folder / "model.gguf")
        return folder / "model.gguf"
    checkpoints.write_checkpoint(folder / "hf", num_shards=2 if kind == "sharded" else 1)
    if kind != "saved":
        return folder / "hf"
    save(folder / "saved", *load(folder / "hf"))
    return folder / "saved"


KINDS = ("single", "sharded", "saved", "gguf")


def change_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", KINDS)
def test_load_takes_the_plan_of_these_weights_and_refuses_others(tmp_path, kind):
    checkpoint = make_checkpoint(kind, tmp_path)
    assert load(checkpoint)[1].plan is None
    own = fingerprint(checkpoint)
    assert len(own) == 64 and fingerprint(str(checkpoint)) == own
    plan = dataclasses.replace(TWO_LAYERS, fingerprint=own)
    plan.write(plan_path(checkpoint), measured=MEASURED)
    assert fingerprint(checkpoint) == own  # a plan changes nothing
    assert find_plan(checkpoint) == plan
    assert load(checkpoint)[1].plan == plan
    assert load(checkpoint, use_plan=False)[1].plan is None
    assert ModelConfig.from_pretrained(checkpoint).plan is None
    others = [
        dataclasses.replace(plan, fingerprint="0" * 64),
        dataclasses.replace(plan, fingerprint=""),
        dataclasses.replace(PLAN, fingerprint=own),
    ]
    for other in others:
        other.write(plan_path(checkpoint), measured=MEASURED)
        with pytest.raises(ValueError, match="sketchwalk calibrate --model") as raised:
            load(checkpoint)
        assert str(plan_path(checkpoint)) in str(raised.value)
        assert load(checkpoint, use_plan=False)[1].plan is None
    # A byte of the weights changes the fingerprint.
    found = [path for path in (checkpoint, *checkpoint.rglob("*")) if path.is_file()]
    largest = max(found, key=lambda path: path.stat().st_size)
    for is_same in (False, True):
        change_byte(largest, -3)
        assert (fingerprint(checkpoint) == own) == is_same


def test_the_configuration_changes_the_fingerprint_and_names_do_not(tmp_path):
    checkpoint = make_checkpoint("single", tmp_path)
    before = fingerprint(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    for change, is_same in (
        ({"rope_theta": 10001.0}, False),
        ({"rms_norm_eps": 1e-6}, False),
        ({"eos_token_id": 2, "transformers_version": "9"}, True),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config | change))
        assert (fingerprint(checkpoint) == before) == is_same
    renamed = checkpoint.rename(tmp_path / "other name")
    (renamed / "tokenizer.json").write_text("{}")
    assert fingerprint(renamed) == before


def test_of_a_large_file_pieces_are_read(tmp_path):
    """Half a gigabyte that takes no disk space, after a header of one tensor."""
    checkpoint = make_checkpoint("gguf", tmp_path)
    with checkpoint.open("r+b") as file:
        file.truncate(2**29)
    before = fingerprint(checkpoint)
    assert fingerprint(checkpoint) == before
    for place, is_sampled in ((2**29 - 1, True), (2**29 * 5 // 63 - 100_000, False)):
        with checkpoint.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        assert (fingerprint(checkpoint) != before) == is_sampled
        with checkpoint.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")


def test_a_saved_model_has_its_plan(tmp_path):
    params, model_config = load(make_checkpoint("single", tmp_path))
    planned = dataclasses.replace(
        model_config, plan=dataclasses.replace(TWO_LAYERS, fingerprint="1" * 64)
    )
    save(tmp_path / "saved", params, planned)
    found = load(tmp_path / "saved")[1]
    assert found.plan == dataclasses.replace(
        planned.plan, fingerprint=fingerprint(tmp_path / "saved")
    )
    assert dataclasses.replace(found, plan=None) == model_config
    assert "plan" not in (tmp_path / "saved" / "model_config.json").read_text()
    save(tmp_path / "saved", params, model_config, overwrite=True)
    assert load(tmp_path / "saved")[1].plan is None
    assert not plan_path(tmp_path / "saved").exists()


@pytest.mark.unchecked
def test_a_plan_of_other_layers_or_no_plan_is_refused_in_a_configuration(tmp_path):
    model_config = ModelConfig.from_dict(checkpoints.tiny_config())
    with pytest.raises(ValueError, match="plan must be of 2 layers, got one of 3"):
        dataclasses.replace(model_config, plan=PLAN)
    with pytest.raises(ValueError, match="plan must be a Plan or None"):
        dataclasses.replace(model_config, plan={"densities": []})
    planned = dataclasses.replace(model_config, plan=TWO_LAYERS)
    assert hash(planned) != hash(model_config) and planned != model_config


# The loss that a user allows.


def test_rows_take_the_least_density_that_keeps_to_a_loss():
    for max_kl, prefill, decode in (
        (0.1, ((0, 0.2), (2048, 0.1)), ((0, 0.1),)),
        (0.025, ((0, 0.4), (2048, 0.2)), ((0, 0.4),)),
        (0.005, ((0, 1.0), (2048, 0.4)), ((0, 1.0),)),
        (9, ((0, 0.1),), ((0, 0.1),)),
    ):
        policy = SketchWalkConfig.recommended(max_kl=TEXT_MARGIN * max_kl, plan=KNOWN, min_tokens=1)
        assert policy.least_densities("prefill") == prefill
        assert policy.least_densities("decode") == decode
        assert policy.density == min(density for _, density in (*prefill, *decode))
        for phase, size in (("prefill", 64), ("decode", 16)):
            is_token, rows = phase == "decode", 4096 // size
            found = policy.budgets(rows, is_token=is_token)
            begins = np.arange(rows) * size
            for start, density in policy.least_densities(phase):
                ends = [x for x, _ in policy.least_densities(phase) if x > start]
                some = (begins >= start) & (begins < min(ends, default=4096))
                shares = KNOWN.share_density(density)
                sink, local = policy.forced
                least = {"pages": size // 16, "least": sink + (4 if is_token else local)}
                # Layers that are dense at the least density are dense at all.
                sparse = [i for i in range(3) if not policy.is_dense(i)]
                want = [page_budget(rows, density=shares[i], **least)[some] for i in sparse]
                assert sparse or policy.density == 1.0
                assert not sparse or np.array_equal(found[:, some], want)


def test_a_loss_without_a_measurement_is_that_of_other_models():
    policy = SketchWalkConfig.recommended(max_kl=0.05)
    assert policy.least_densities("decode") == least_densities(TYPICAL_LOSSES, 0.05, "decode")
    assert with_plan(policy, PLAN).least_densities("decode") == policy.least_densities("decode")
    assert with_plan(policy, KNOWN).least_densities("decode") == ((0, 0.4),)
    strict, loose = (
        [one for phase in PHASES for _, one in least_densities(TYPICAL_LOSSES, kl, phase)]
        for kl in (1e-6, 10.0)
    )
    assert min(strict) > min(loose)
    assert least_densities((), 0.5, "prefill") == ((0, 1.0),)


@pytest.mark.unchecked
@pytest.mark.parametrize("changed", [{"tokens": True}, {"kl": 0.2, "most": 0.1}, {"kept": 0.0}])
def test_impossible_losses_are_refused(changed):
    with pytest.raises(ValueError, match="kl up to most"):
        dataclasses.replace(TYPICAL_LOSSES[0], **changed)


def test_longer_texts_keep_the_share_that_was_measured():
    """A minimum of keys is a larger share of a short text than of a long one."""
    losses = [Loss("decode", 4096, 0.05, 0.5, 0.001, 0.001, 1.0)]
    assert least_densities(losses, 0.01, "decode") == ((0, 0.05), (4096, 0.5))


@pytest.mark.unchecked
def test_a_loss_and_a_density_exclude_each_other():
    with pytest.raises(ValueError, match="density must be left out with max_kl"):
        SketchWalkConfig.recommended(max_kl=0.1, density=0.1)
    for wrong in (0, -1.0, float("nan"), "0.1", True):
        with pytest.raises(ValueError, match="max_kl must"):
            SketchWalkConfig.recommended(max_kl=wrong)
    policy = SketchWalkConfig.recommended(max_kl=0.1)
    with pytest.raises(ValueError, match="not max_kl"):
        fit_density(policy, tiny.MODEL, density=0.1, num_tokens=4096, phase="prefill")


def test_programs_do_not_know_the_allowed_loss():
    made = [
        SketchWalkConfig.recommended(max_kl=kl, plan=KNOWN, min_tokens=64).for_program(3, 64)
        for kl in (0.3, 0.075)
    ]
    assert made[0][0] == made[1][0]
    assert (made[0][1]["prompt"] < made[1][1]["prompt"]).any()


# Runs with a plan.


@pytest.mark.slow
def test_the_recommended_policy_with_the_plan_runs_where_none_is_given():
    plan = tiny.plan((0.1, 0.5), (0.9, 0.1), (0.01, 0.005), (0.5, 0.2), (0.02, 0.01))
    model = dataclasses.replace(tiny.MODEL, plan=plan, max_position_embeddings=2**14)
    recommended = SketchWalkConfig.recommended(plan=plan)
    made = make_generate(tiny.MODEL, max_new_tokens=3)
    assert made.policy == Auto(SketchWalkConfig.recommended())
    assert make_generate(model, max_new_tokens=3).policy == Auto(recommended)
    paper = tiny.POLICIES["paper"]
    assert make_generate(model, paper, max_new_tokens=3).policy == paper
    call = {"model_config": model, "max_new_tokens": 3, "max_tokens": 2**14}  # long enough to pay
    params, tokens = tiny.params(), tiny.prompts(300)[0]
    found = generate(params, tokens, **call)
    wanted = generate(params, tokens, policy=recommended, **call)
    chex.assert_trees_all_equal(dataclasses.replace(found, choice=None), wanted)
    *_, last = stream(params, tokens, **call)
    chex.assert_trees_all_equal(last.measured_density, jax.device_get(found.measured_density))


def test_policies_take_the_plan_of_a_model_where_they_have_none():
    recommended = by_name("sketchwalk", preset="recommended")
    assert with_plan(recommended, None) == recommended
    planned = with_plan(recommended, TWO_LAYERS)
    assert planned == SketchWalkConfig.recommended(plan=TWO_LAYERS)
    assert with_plan(planned, PLAN) == planned
    paper = by_name("sketchwalk", preset="paper")
    assert with_plan(paper, PLAN) == paper
    assert changed_fields(planned)["plan"] == TWO_LAYERS.short_hash
