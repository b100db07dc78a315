"""Arguments that do not fit are refused before anything runs, with advice in the message."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import tiny_config, write_checkpoint
from tiny import MODEL, POLICIES

from sketchwalk_jax import (
    Auto,
    BlockSelection,
    Dense,
    KernelConfig,
    Sampling,
    SketchWalkConfig,
    block_sparse_attention,
    block_sparse_decode,
    cli,
    decode_step,
    dense_attention,
    forward,
    generate,
    init_cache,
    init_layer_cache,
    init_walk,
    make_generate,
    memory,
    policies,
    prefill,
    sharding,
    sketchwalk_attention,
    sketchwalk_cached_attention,
    stream,
)
from sketchwalk_jax.attention.mass import block_mass
from sketchwalk_jax.evaluation import EvaluationConfig
from sketchwalk_jax.inference import calls
from sketchwalk_jax.models import ModelConfig, load
from sketchwalk_jax.models.rope import RopeConfig
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.quest import QuestConfig

pytestmark = pytest.mark.unchecked  # a user's call

PAPER = POLICIES["paper"]
TOKENS, LENGTHS = tiny.prompts(40, 20)
OPTIONS = {"model_config": MODEL, "policy": PAPER}


@pytest.fixture(scope="module")
def weights():
    return tiny.params()


def made(config=PAPER, batch=2, max_tokens=64, dtype=None, **changes):
    model = dataclasses.replace(MODEL, **changes)
    return init_cache(model, config, batch=batch, max_tokens=max_tokens, dtype=dtype)


CALLS = {
    "generate": lambda w, x, **o: generate(w, x, max_new_tokens=1, **OPTIONS | o),
    "stream": lambda w, x: stream(w, x, max_new_tokens=1, **OPTIONS),
    "forward": lambda w, x: forward(w, x, **OPTIONS),
    "prefill": lambda w, x, cache=None: prefill(w, x, cache or made(), **OPTIONS),
    "decode_step": lambda w, x, cache=None: decode_step(w, x[:, 0], cache or made(), **OPTIONS),
    "jit": lambda w, x: jax.jit(lambda w: CALLS["generate"](w, x).tokens)(w),
}
WITH_CACHE = ("prefill", "decode_step", "generate")


@pytest.mark.parametrize("name", CALLS)
def test_a_tree_of_another_number_of_layers_is_refused(name):
    fewer = tiny.params(model=dataclasses.replace(MODEL, num_layers=3))
    with pytest.raises(ValueError, match="num_layers is 4, the arrays have 3 layers; take the"):
        CALLS[name](fewer, TOKENS)


def changed(weights, change):
    """Copies the tree and applies `change`."""
    copy = jax.tree.map(lambda x: x, weights)
    change(copy)
    return copy


def as_type(layer, dtype):
    """Returns a change of the dtype of one kernel."""
    return lambda x: x[layer].update(kernel=x[layer]["kernel"].astype(dtype))


TREES = [
    (lambda x: x.pop("final_norm"), "final_norm/scale is missing"),
    (lambda x: x["layers"].pop("gate"), "layers/gate/kernel is missing"),
    (
        lambda x: x["layers"]["query"].update(bias=jnp.zeros((4, 4, 16))),
        "layers/query/bias is unknown",
    ),
    (
        lambda x: x["layers"]["key"].update(kernel=x["layers"]["key"]["kernel"][:, :, :1]),
        r"layers/key/kernel must be \(4, 32, 2, 16\), got \(4, 32, 1, 16\)",
    ),
    (as_type("lm_head", jnp.int8), "lm_head/kernel must be one of .* got int8"),
    (lambda x: x["final_norm"].update(scale=1.0), "scale must be an array, got float"),
    (
        lambda x: as_type("up", jnp.bfloat16)(x["layers"]),
        r"embedding's dtype float32, got bfloat16 for layers/up/kernel and 0 others; load\(",
    ),
]


@pytest.mark.parametrize(("change", "message"), TREES)
@pytest.mark.parametrize("name", ["generate", "decode_step"])
def test_a_tree_that_does_not_fit_is_refused(weights, change, message, name):
    with pytest.raises(ValueError, match=message):
        CALLS[name](changed(weights, change), TOKENS)
    with pytest.raises(ValueError, match="got a list"):
        CALLS[name]([weights], TOKENS)


def other(**changes):
    return dataclasses.replace(PAPER, **changes)


CACHES = {
    "fewer layers": (lambda: made(num_layers=3), "num_layers = 4, got keys .3, 2, 64, 2, 16"),
    "more layers": (lambda: made(num_layers=5), "num_layers = 4, got keys .5, 2, 64, 2, 16"),
    "other heads": (lambda: made(num_kv_heads=1), r"key is float32\[4, 2, 64, 2, 16\], got"),
    "other dtype": (
        lambda: made(dtype="bfloat16"),
        r"dtype of params, float32, got bfloat16; .*init_cache\(..., dtype='float32'\)",
    ),
    "other batch": (lambda: made(batch=3), "the cache's batch size 3, got 2"),
    "dense": (lambda: made(Dense(block_size=16)), "same policy, .*, got one with no statistics"),
    "other policy": (lambda: made(QuestConfig()), "got one with statistics of QuestConfig"),
    "other dense layers": (
        lambda: made(other(dense_layers=(2,))),
        r"in layers \[1, 2, 3\].* got one with .* in layers \[0, 1, 3\]",
    ),
    "other seed": (lambda: made(other(seed=1)), "'seed': 0.* got one with .*'seed': 1"),
    "no cache": (lambda: [1], r"cache must be a Cache \(init_cache makes one\), got list"),
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("name", WITH_CACHE)
def test_a_cache_that_does_not_fit_is_refused(weights, case, name):
    make, message = CACHES[case]
    with pytest.raises(ValueError, match=message):
        CALLS[name](weights, TOKENS, cache=make())


def test_caches_of_thresholds_and_without_statistics(weights):
    adamas, shifted = (AdamasConfig(block_size=16, thresholds=(-x, 0.0, x)) for x in (1.0, 2.0))
    options = {"model_config": MODEL, "max_new_tokens": 1}
    with pytest.raises(ValueError, match="thresholds"):
        generate(weights, TOKENS, policy=adamas, cache=made(shifted), **options)
    # Statistics would miss the tokens of a dense call.
    with pytest.raises(ValueError, match="Dense with no statistics, got one with statistics of"):
        generate(weights, TOKENS, policy=Dense(block_size=16), cache=made(), **options)


@pytest.mark.slow
def test_a_cache_goes_on_with_another_density(weights):
    _, cache = prefill(weights, TOKENS, made(), **OPTIONS)
    config = other(density=0.9)
    logits, _ = decode_step(weights, TOKENS[:, 0], cache, model_config=MODEL, policy=config)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", WITH_CACHE)
def test_a_cache_is_not_used_twice(weights, name):
    cache = made()
    _, later = prefill(weights, TOKENS, cache, **OPTIONS)
    decode_step(weights, TOKENS[:, 0], later, **OPTIONS)
    assert "donated" in repr(later)
    with pytest.raises(ValueError, match="cache must not have been used before.*continue with the"):
        CALLS[name](weights, TOKENS, cache=cache)
    assert "donated" in repr(cache)


@pytest.mark.parametrize("token", [-1, MODEL.vocab_size, 2**31 - 1])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_ids_outside_the_vocabulary_are_refused(weights, token, kind):
    wrong = TOKENS.copy()
    wrong[1, 7] = token
    wrong = kind(wrong)
    message = rf"from 0 to 63, got {token} at \[1, 7\]; take the tokenizer of"
    for name in ("generate", "stream", "forward", "prefill"):
        with pytest.raises(ValueError, match=message):
            CALLS[name](weights, wrong)
    with pytest.raises(ValueError, match=rf"got {token} at \[1\]"):
        decode_step(weights, wrong[:, 7], made(), **OPTIONS)


@pytest.mark.slow
def test_padding_may_hold_anything(weights):
    padded = np.where(np.arange(40)[None] < LENGTHS[:, None], TOKENS, -100)
    found = [
        generate(weights, x, lengths=LENGTHS, max_new_tokens=2, **OPTIONS).tokens
        for x in (TOKENS, padded)
    ]
    np.testing.assert_array_equal(*found)


ARGUMENTS = {
    "key": ({"key": jax.random.key(1)}, "key must be None without sampling.*pass sampling="),
    "end token": ({"eos_token_ids": 5}, "eos_token_ids must be a tuple of token ids, got 5"),
    "end token outside": ({"eos_token_ids": (64,)}, "eos_token_ids must be ids.*63, got 64"),
    "max_tokens": ({"max_tokens": 99.5}, "max_tokens must be None or a positive integer, got 99.5"),
    "lengths": ({"lengths": [0, 4]}, r"lengths must be between 1 and the 40 columns.*\[0, 4\]"),
    "model": ({"model_config": "llama"}, "model_config must be a ModelConfig, got 'llama'"),
} | {
    repr(one): ({"sampling": one}, "sampling must be a Sampling or None, got")
    for one in (0.7, "greedy", {"top_k": 1}, Sampling)
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_generate(weights, case):
    options, message = ARGUMENTS[case]
    for function in (generate, stream):
        with pytest.raises(ValueError, match=message):
            function(weights, TOKENS, max_new_tokens=2, **OPTIONS | options)


_DENSITY = r"density must be a Python number.*(float\(density\)|got a traced array)"


@pytest.mark.parametrize("kind", [jnp.asarray, np.float32, np.asarray, "traced"])
@pytest.mark.parametrize("preset", ["paper", "recommended"])
def test_a_density_in_an_array_is_refused(kind, preset):
    make = getattr(SketchWalkConfig, preset)
    with pytest.raises(ValueError, match=_DENSITY):
        jax.jit(lambda x: make(density=x))(0.3) if kind == "traced" else make(density=kind(0.3))


LAYER = {"query": (2, 40, 4, 32), "key": (2, 40, 2, 32), "value": (2, 40, 2, 32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 40, 128)}, r"query must have shape \[B, T, N, H\]"),
        ({"value": (2, 40, 1, 32)}, "key and value must have one shape"),
        ({"query": (2, 40, 3, 32)}, "must be a multiple of the key/value heads 2"),
        ({"query": (2, 40, 4, 16)}, "key must have query's head_dim 16"),
        ({"query": (2, 30, 4, 32)}, "key must have as many tokens as query, 30, got 40"),
        ({"walk": init_walk(2, 80, policy=PAPER)}, "walk must have scores of shape"),
        ({"lengths": jnp.array([40])}, "lengths must have shape"),
        ({"lengths": [0, 4]}, r"lengths must be between 1 and the 40 columns of query, got \[0"),
        ({"lengths": np.array([4, 41])}, "lengths must be between 1 and"),
        ({"lengths": jnp.array([[4]])}, "lengths must be an integer array"),
        ({"lengths": np.array([4.0])}, "lengths must be an integer array"),
    ],
)
def test_arrays_lengths_and_walks_that_do_not_fit_one_layer(change, message):
    call = LAYER | {"walk": init_walk(2, 40, policy=PAPER)} | change
    call |= {name: jnp.ones(call[name]) for name in LAYER}
    with pytest.raises(ValueError, match=message):
        sketchwalk_attention(**call, policy=PAPER)


@pytest.mark.parametrize("dtype", ["int7", "int32", "float64", object()])
def test_a_dtype_that_is_none_of_a_models(dtype, tmp_path):
    write_checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match="dtype must be one of .'float32', 'float16', 'bfloat16'"):
        load(tmp_path / "model", dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be one of .'float32', 'float16', 'bfloat16'"):
        init_cache(MODEL, PAPER, batch=1, max_tokens=16, dtype=dtype)


CONFIGS = {
    "a word": ({"num_hidden_layers": "twelve"}, "num_hidden_layers must be a positive .*'twelve'"),
    "a number in quotes": ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
    "a fraction": ({"vocab_size": 64.5}, "vocab_size must be a positive integer, got 64.5"),
    "true": ({"num_attention_heads": True}, "num_attention_heads must be a positive integer"),
    "a list": ({"intermediate_size": [64]}, "intermediate_size must be a positive integer"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
    "no kv heads": ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer"),
    "no head_dim": ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
    "endless": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
    "theta 0": ({"rope_theta": 0}, "rope_theta must be a finite number larger than 1, got 0"),
    "theta inside": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        "rope_theta must be a finite number larger than 1, got 0",
    ),
    "theta nan": ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
    "theta in quotes": ({"rope_theta": "1e6"}, "rope_theta must be a finite number"),
    "scaling": ({"rope_scaling": "linear"}, "rope_scaling must be a JSON object, got 'linear'"),
    "factor": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a finite"),
    "eps": ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number, got 'small'"),
    "bias": ({"attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
    "tied": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    "end": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
    "layer_types": ({"layer_types": 7}, "layer_types must be a list of names"),
    "window": ({"sliding_window": "wide"}, "sliding_window must be an integer of at least 0"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_attribute_of_another_type_is_refused_by_its_name(case):
    changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(tiny_config("llama") | changes)


@pytest.mark.slow
def test_logits_that_are_not_finite_are_reported(weights):
    """The report names the sequence with such tokens, and no other."""
    bad = changed(
        weights,
        lambda x: x["embed"].update(embedding=x["embed"]["embedding"].at[62].set(jnp.nan)),
    )
    tokens = np.where(TOKENS >= 62, 0, TOKENS)
    tokens[1, 5] = 62
    options = {"lengths": LENGTHS, "max_new_tokens": 3, **OPTIONS}
    out = generate(bad, tokens, **options)
    assert out.is_finite.tolist() == [True, False]
    chunks = list(stream(bad, tokens, every=2, **options))
    assert [chunk.is_finite.tolist() for chunk in chunks] == [[True, False]] * len(chunks)
    assert generate(weights, tokens, **options).is_finite.tolist() == [True, True]


def test_the_command_line_warns_of_logits_that_are_not_finite(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    write_checkpoint(tmp_path / "model", tokenizer=True)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, path)
    arguments = ["generate", "--model", tmp_path / "model", "--prompt", "ab", "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        assert cli.main([*map(str, arguments), "--max-new-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["is_finite"] is False
    assert "warning: logits were NaN or infinite" in err and "--dtype bfloat16" in err


@pytest.mark.slow
def test_a_generation_and_a_cache_print_in_one_line(weights):
    out = generate(weights, TOKENS, max_new_tokens=2, return_selection=True, **OPTIONS)
    assert repr(out).startswith("Generation(tokens=int32[2, 2], lengths=[2, 2], is_finite=[True,")
    said = "Cache(4 layers, 2 sequences of 304 tokens, float32, 0.60 MiB"
    assert said in repr(out) and len(repr(out)) < 300 and "\n" not in repr(out)
    for tree in (jax.eval_shape(lambda: out), jax.tree.map(lambda _: object(), out)):
        assert len(repr(tree)) < 400
    assert repr(jax.tree.map(lambda _: object(), out.cache)) == "Cache(...)"


class Device:
    """A stand-in for a device with little memory."""

    def __init__(self, free):
        self.free = free

    def memory_stats(self):
        return {"bytes_limit": 2**30, "bytes_in_use": 2**30 - self.free}


@pytest.mark.slow
def test_too_little_memory_is_said_before_the_attempt(weights, monkeypatch):
    size = calls.cache_bytes(MODEL, PAPER, 2, 42, "float32")
    real = made(max_tokens=42)
    assert size == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(real))
    free_bytes, free = memory.free_bytes, 0
    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda _: free_bytes(Device(free)))
        for function in (generate, lambda *a, **k: next(stream(*a, **k))):
            free = size
            function(weights, TOKENS, max_new_tokens=2, max_tokens=42, **OPTIONS)
            free = size - 1
            with pytest.raises(memory.OutOfDeviceMemory, match="0.09 MiB free for the cache of 2 "):
                function(weights, TOKENS, max_new_tokens=2, max_tokens=42, **OPTIONS)
    assert memory.free_bytes(weights["embed"]["embedding"]) is None  # CPUs do not report it


def test_a_failure_for_want_of_memory_ends_with_advice(weights, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nBuffers:\n 1. ...")

    fail.compile = lambda *_, **__: None
    from sketchwalk_jax.inference import generation, steps

    chunks = stream(weights, TOKENS, max_new_tokens=2, **OPTIONS)
    next(chunks)
    for module, names in ((generation, ("_start", "_continue")), (steps, ("_prefill", "_decode"))):
        for name in names:
            monkeypatch.setattr(module, name, fail)
    runs = {name: functools.partial(CALLS[name], weights, TOKENS) for name in CALLS}
    del runs["jit"]
    runs |= {"stream": lambda: next(CALLS["stream"](weights, TOKENS)), "rest": lambda: next(chunks)}
    for run in runs.values():
        with pytest.raises(memory.OutOfDeviceMemory) as raised:
            run()
        said = str(raised.value)
        assert "Out of memory. (the call holds at least 0." in said and "MiB of cache" in said
        assert all(word in said for word in ("chunk_size", "max_tokens", "dtype", "density"))
        assert "Buffers" not in said
    message, status = cli.errors.explain(raised.value)
    assert "--chunk-size" in message and "load(" not in message and status == 1


def in_buckets(weights, tokens=TOKENS, **given):
    return make_generate(MODEL, PAPER, max_new_tokens=2)(weights, tokens, **given)


def test_lengths_are_compared_with_what_was_given_and_not_with_its_padding(weights):
    for lengths in ([40, 41], [40, 64]):
        with pytest.raises(ValueError, match=r"between 1 and the 40 columns of tokens, got \[40"):
            in_buckets(weights, lengths=lengths)
    found = in_buckets(weights, lengths=LENGTHS)
    given = generate(weights, TOKENS, lengths=LENGTHS, max_new_tokens=2, **OPTIONS)
    np.testing.assert_array_equal(found.tokens, given.tokens)


X = jnp.ones((1, 64, 4, 16))
RAGGED = [[1], [2, 3]]
NO_MODEL, NO_POLICY = "model_config must be a ModelConfig, got a dict", "policy must be a policy"
# Arguments in the wrong place or of the wrong kind, and their messages.
CONFUSED = [
    (lambda w: CALLS["generate"](w, RAGGED), "got a list"),
    (lambda w: in_buckets(w, RAGGED), "tokens must be an integer array"),
    (lambda w: in_buckets(w, lengths=RAGGED), "lengths must be .* ragged list"),
    (lambda w: sketchwalk_attention(X, X, X, lengths=RAGGED), "lengths must be .* ragged list"),
    (lambda w: in_buckets(w, attention_mask=[[1] * 40] * 2), "attention_mask must be an array"),
    (lambda w: CALLS["generate"](TOKENS, w), r"an integer array \[B, T\], got a dict of \['embed'"),
    (lambda w: in_buckets(TOKENS, w), "tokens must be .* got a dict"),
    (lambda w: CALLS["forward"](TOKENS, w), "tokens must be .* dict"),
    (lambda w: prefill(w, made(), TOKENS, **OPTIONS), "tokens must be .* got a Cache"),
    (lambda w: CALLS["generate"](None, TOKENS), "params must be a parameter tree from load, got N"),
    (
        lambda w: CALLS["generate"](w, TOKENS, model_config=w),
        rf"{NO_MODEL} of .*load returns \(params, model_config",
    ),
    (lambda w: make_generate(w, MODEL, max_new_tokens=1), NO_MODEL),
    (lambda w: init_cache(w, batch=1, max_tokens=64), NO_MODEL),
    (lambda w: make_generate(MODEL, MODEL, max_new_tokens=1), f"{NO_POLICY} .* got a ModelConfig"),
    (
        lambda w: sketchwalk_attention(X, X, X, policy="paper"),
        f"{NO_POLICY} .* got 'paper'; sketchwalk_jax.policies.by_name makes",
    ),
    (lambda w: init_walk(1, 64, policy=Dense), f"{NO_POLICY} .* got the class Dense; call it"),
    (lambda w: sketchwalk_attention(X, X, X, Dense()), "a WalkState from init_walk, got a Dense"),
    (lambda w: sketchwalk_attention([1.0], X, X), "query must be an array"),
    (lambda w: sharding.place(MODEL, MODEL), "mesh must be a mesh"),
]


@pytest.mark.parametrize(("call", "message"), CONFUSED)
def test_confused_arguments_are_named_in_a_line(weights, call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call(weights)
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)


def configurations():
    """Makes one of every class whose fields a user sets, by name."""
    found = {name: by_name(name) for name in policies.POLICIES}
    found |= {one: by_name("sketchwalk", preset=one) for one in policies.PRESETS}
    found |= {"Sampling": Sampling(), "KernelConfig": KernelConfig(), "RopeConfig": RopeConfig()}
    found |= {"ModelConfig": MODEL, "Plan": tiny.plan((0.1, 0.5), (0.2, 0.1)), "Auto": Auto()}
    return found | {"EvaluationConfig": EvaluationConfig(policies=("dense",))}


WRONG = ("x", b"x", object(), {"a": 1}, (1, "a"), [[1], [1, 2]], np.array(["x", "y"]), int, 1j)
CONFIGURATIONS = configurations()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_field_of_a_wrong_type_is_named(name):
    made = CONFIGURATIONS[name]
    for field in dataclasses.fields(made):
        for value in WRONG[field.name == "fingerprint" :]:  # it may be any text
            with pytest.raises(ValueError, match=rf"\b{field.name}\b"):
                dataclasses.replace(made, **{field.name: value})


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(Sampling)])
@pytest.mark.parametrize("value", [None, True, (1,), np.array(True), "0.5"])
def test_no_number_is_no_setting_of_sampling(field, value):
    with pytest.raises(ValueError, match=f"{field} must be "):
        Sampling(**{field: value})


SIZES = {"B": 2, "T": 40, "S": 40, "N": 4, "K": 2, "H": 16}


@pytest.mark.parametrize("empty", ["B", "T", "S", "T S", "K", "N K", "H"])
def test_arrays_without_entries_are_refused_by_every_attention(empty):
    from sketchwalk_jax.flax import WalkAttention, make_attention_fn

    size = SIZES | dict.fromkeys(empty.split(), 0)
    query = jnp.ones([size[axis] for axis in "BTNH"])
    key = jnp.ones([size[axis] for axis in "BSKH"])
    ids = jnp.zeros((size["B"], 1, -(-size["T"] // 16), 3), jnp.int32)
    lists = BlockSelection(ids, ids[..., 0], 16)
    cache = init_layer_cache(2, 48, num_heads=4, num_kv_heads=2, head_dim=16, policy=PAPER)
    attend = {
        "dense": dense_attention,
        "lists": functools.partial(block_sparse_attention, selection=lists),
        "decode": functools.partial(
            block_sparse_decode, selection=lists, kv_lengths=jnp.ones((size["B"],), jnp.int32)
        ),
        "layer": functools.partial(sketchwalk_attention, policy=PAPER),
        "cached": functools.partial(sketchwalk_cached_attention, cache=cache, policy=PAPER),
        "function": functools.partial(make_attention_fn(PAPER), is_causal=True),
        "module": functools.partial(WalkAttention(PAPER), is_causal=True),
    }
    for name, function in attend.items():
        if name in ("function", "module") and empty in ("T", "S"):
            continue  # cross-attention raises another error
        with pytest.raises(ValueError, match="must have no axis of size 0, got shape"):
            function(query, key, key)
    with pytest.raises(ValueError, match="must have no axis of size 0, got shape"):
        block_mass(query, key, block_size=16)


def test_layers_of_no_heads_are_refused():
    from flax import nnx

    from sketchwalk_jax.flax import LinenWalkSelfAttention, WalkSelfAttention

    for heads, options, words in (
        (0, {}, "num_heads must be a positive integer, got 0"),
        (4, {"num_kv_heads": 0}, "num_kv_heads must be a positive integer, got 0"),
        (4, {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        (4, {"head_dim": 0}, "head_dim must be a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            WalkSelfAttention(heads, 32, rngs=nnx.Rngs(0), **options)
        with pytest.raises(ValueError, match=words):
            LinenWalkSelfAttention(heads, **options).init(jax.random.key(0), jnp.ones((1, 40, 32)))
