"""Settings of an evaluation: rules, phases, fields, and refused values."""

import pytest

from sketchwalk_jax import Dense, SketchWalkConfig
from sketchwalk_jax.evaluation.rows import group_key, group_key_of
from sketchwalk_jax.evaluation.settings import DENSE, EvaluationConfig, Rule
from sketchwalk_jax.policies.minference import MInferenceConfig
from sketchwalk_jax.policies.streaming import StreamingConfig


def test_rules_are_dense_and_every_policy_at_its_densities():
    config = EvaluationConfig(
        policies=("sketchwalk", "dense", "random"),
        presets=("paper", "released"),
        densities=(0.1, 0.2),
    )
    assert config.rules() == (
        DENSE,
        Rule("sketchwalk", "paper", 0.1),
        Rule("sketchwalk", "paper", 0.2),
        Rule("sketchwalk", "released", None),
        Rule("random", None, 0.1),
        Rule("random", None, 0.2),
    )
    assert config.rules()[2].make() == SketchWalkConfig.paper(density=0.2)
    assert [str(rule) for rule in config.rules()[:4:3]] == ["dense", "released"]


def test_phases_are_those_in_which_a_policy_selects():
    config = EvaluationConfig(phases=("both", "decode"))
    assert config.phases_of(SketchWalkConfig.paper()) == ("both", "decode")
    assert config.phases_of(Dense()) == ("both",)

    class DecodeOnly(type(SketchWalkConfig.paper())):
        phases = ("decode",)

    assert config.phases_of(DecodeOnly()) == ("decode",)


def test_fields_are_set_in_every_policy_that_has_them():
    policies = ("minference", "streaming")
    fields = {"dense_layers": 3, "slash": 9}
    config = EvaluationConfig(policies=policies, densities=(0.2,), fields=fields)
    dense, minference, streaming = config.rules()
    assert dense == DENSE and minference.make() == MInferenceConfig(dense_layers=3, slash=9)
    assert streaming.make() == StreamingConfig(density=0.2, dense_layers=3)
    assert config.describe()["fields"] == fields
    assert "fields" not in EvaluationConfig().describe()  # as in older files


def test_rules_with_a_threshold_are_published_until_they_are_calibrated():
    config = EvaluationConfig(policies=("minference", "streaming"), densities=(0.1, 0.2))
    rules = config.rules()
    assert rules[:3] == (DENSE, Rule("minference", None, 0.1), Rule("minference", None, 0.2))
    assert rules[1].make() == MInferenceConfig()
    assert [rule.is_calibrated for rule in rules] == [False, True, True, False, False]
    assert config.phases_of(rules[1].make()) == ("prefill",)


def test_reduced_keeps_what_is_given():
    config = EvaluationConfig.reduced(tokens=(1024,), prompts=7)
    assert (config.tokens, config.prompts, config.densities) == ((1024,), 7, (0.2,))
    names = ["dense", "streaming 0.2", "quest 0.2", "recommended 0.2"]
    assert list(map(str, config.rules())) == names
    everything = EvaluationConfig(densities=(0.2,))
    all_of_them = EvaluationConfig.reduced(policies=everything.policies, presets=everything.presets)
    assert all_of_them.rules() == everything.rules()
    assert config.num_prompts("variable_tracking") == 10 and config.num_prompts("multi_key") == 7


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ("kascade",)}, r"policies must be one of \('dense', .*, got 'kascade'"),
        ({"phases": ()}, "phases must hold at least one value"),
        ({"densities": (0.1, 0.1)}, "densities must hold at least one value, each once"),
        ({"fields": {"slash": 9}, "policies": ("oracle",)}, "fields must be .*, got 'slash'"),
        ({"fields": {"density": 0.5}}, "fields must be of a policy that is run, got 'density'"),
        ({"fields": {"sketch_dim": 0}}, "sketch_dim must be None or a positive integer, got 0"),
        ({"densities": (2.0,)}, r"density must be in \(0, 1\], got 2.0"),
        (
            {"policies": ("flexprefill",), "densities": (2.0,)},
            r"density must be in \(0, 1\], got 2.0",
        ),
        ({"tokens": (0,)}, "tokens must be a positive integer, got 0"),
        ({"prompts": 0}, "prompts must be a positive integer, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"wording": "loud"}, r"wording must be one of \('plain', 'chat'\), got 'loud'"),
        ({"tries": 0}, "tries must be a positive integer, got 0"),
        ({"answerable": 1}, "answerable must be True or False, got 1"),
        ({"density_over": "layers"}, "density_over must be one of"),
        (
            {"variants": (Rule("sketchwalk", "paper", 0.2, (("exponent", 4),)),)},
            "variants must have names of their own",
        ),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**fields)


def test_variants_of_one_policy_run_side_by_side():
    variants = tuple(
        Rule("sketchwalk", "paper", 0.2, (("exponent", exponent),), f"exponent={exponent}")
        for exponent in (1, 4)
    )
    config = EvaluationConfig(
        policies=("sketchwalk",), presets=("paper",), densities=(0.2,), variants=variants
    )
    assert config.rules()[-2:] == variants
    assert [rule.make().exponent for rule in config.rules()[1:]] == [8, 1, 4]
    assert str(variants[0]) == "paper exponent=1 0.2"
    keys = {group_key(rule, "both", "multi_key", 4096) for rule in config.rules()}
    assert len(keys) == len(config.rules())
    assert config.describe() == EvaluationConfig().describe()  # a file can be extended
    old = {"policy": "sketchwalk", "preset": "paper", "phase": "both", "task": "multi_key"}
    old |= {"tokens": 4096, "density": 0.2}  # from a file older than variants
    assert group_key_of(old) == group_key(config.rules()[1], "both", "multi_key", 4096)
