"""The device decides which implementations of attention and selection run."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from sketchwalk_jax import (
    Dense,
    KernelConfig,
    SketchWalkConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    generate,
    init_walk,
    load,
    save,
    sketchwalk_attention,
)
from sketchwalk_jax.attention import cudnn
from sketchwalk_jax.inference.cached_layer import LayerSettings, Settings
from sketchwalk_jax.inference.steps import read_into_new_cache
from sketchwalk_jax.models.params import param_shapes
from sketchwalk_jax.models.transformer import sums_of_rows
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.dispatch import choose_implementation
from sketchwalk_jax.selection import full_selection


@pytest.fixture
def on(monkeypatch):
    """Pretends that the default device is an NVIDIA GPU with a compute capability."""

    def fake(capability: str) -> None:
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
        monkeypatch.setattr(dispatch, "device_kind", lambda: f"GPU {capability}")

    return fake


QUERY = {"dtype": "bfloat16", "head_dim": 128, "num_tokens": 128}
LISTS = QUERY | {"implementation": "mosaic_gpu", "block_size": 64, "here": "9.0"}
CUDNN = QUERY | {"implementation": "cudnn", "num_keys": 128, "has_offset": False, "here": "8.0"}
REASONS = [
    (LISTS, {}, None),
    (LISTS, {"here": ""}, r"compute capability 8\.0 .* in prefill, not GPU"),
    (LISTS, {"here": "", "num_tokens": 1}, r"compute capability 8\.0 .* in decode, not GPU"),
    (LISTS, {"dtype": "float32"}, "bfloat16 and float16, not float32"),
    (LISTS, {"head_dim": 256}, "head_dim of at most 128"),
    (LISTS, {"head_dim": 60}, "multiple of 8, not 60"),
    (LISTS, {"block_size": 16}, "block_size of 64 or 128 in prefill"),
    (LISTS, {"block_size": 8, "num_tokens": 1}, "of 16 or 64 or 128 in decode"),
    (CUDNN, {}, None),
    (CUDNN, {"here": ""}, "an NVIDIA GPU of compute capability 8.0"),
    (CUDNN, {"dtype": "float32"}, "bfloat16 and float16, not float32"),
    (CUDNN, {"head_dim": 256}, "head_dim of at most 128"),
    (CUDNN, {"head_dim": 60}, "multiple of 8, not 60"),
    (CUDNN, {"has_offset": True}, "query_offset must be None"),
    (CUDNN, {"num_keys": 127}, "a key for every query, not 127 for 128"),
    (CUDNN, {"return_lse": True}, "no float32 log-sum-exp"),
]


@pytest.mark.parametrize(("usual", "change", "words"), REASONS, ids=str)
def test_a_kernel_is_chosen_where_it_can_run(usual, change, words, on, monkeypatch):
    call = usual | change
    on(call.pop("here"))
    size = (2, call.pop("num_tokens"), 4, call.pop("head_dim"))
    query, name = jax.ShapeDtypeStruct(size, call.pop("dtype")), call.pop("implementation")
    choose = choose_implementation if usual is LISTS else dispatch.choose_dense_implementation
    choose = functools.partial(choose, query=query, **call)
    assert choose("xla") == "xla"
    if usual is CUDNN:
        monkeypatch.setattr(dispatch, "kernels_here", lambda: None)  # they could run instead
    assert choose(None) == ("xla" if words else name)
    if words is None:
        assert choose(name) == name
    else:
        with pytest.raises(NotImplementedError, match=words):
            choose(name)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        choose("flash")


def test_dense_attention_behind_a_cache_takes_full_lists(on):
    on("9.0")

    def choose(asked=None, *, tokens=1, heads=64, keys=128, offset=True, **options):
        query = jax.ShapeDtypeStruct((2, tokens, 4, heads), jnp.bfloat16)
        options |= {"num_keys": keys, "has_offset": offset}
        return dispatch.choose_dense_implementation(asked, query, **options)

    assert choose() == choose(tokens=64) == "mosaic_gpu"
    assert choose(tokens=64, offset=False) == "cudnn"
    assert choose("mosaic_gpu", tokens=64, offset=False) == "mosaic_gpu"
    assert choose(heads=32) == choose(keys=100) == choose("xla") == "xla"
    with pytest.raises(NotImplementedError, match="whole blocks of 64, not 100 of them"):
        choose("mosaic_gpu", keys=100)
    with pytest.raises(NotImplementedError, match="a key for every query, not 128 for 192"):
        choose("mosaic_gpu", tokens=192, offset=False)
    padded = {"tokens": 8192, "keys": 8192, "offset": False, "is_padded": True}
    assert choose(**padded) == "mosaic_gpu"
    assert choose("cudnn", **padded) == choose(**padded | {"keys": 8200}) == "cudnn"
    assert choose(**padded | {"is_padded": False}) == choose(**padded | {"tokens": 4096}) == "cudnn"
    assert choose(**padded, kernel_config=KernelConfig(interpret=True)) == "cudnn"
    longest = padded | {"tokens": 2**18, "keys": 2**18}  # for 2 sequences, lists of 2**25 entries
    assert choose(**longest) == "mosaic_gpu"
    assert choose(**longest | {"tokens": 2**19, "keys": 2**19}) == "cudnn"
    for later in ("8.0", "10.0"):
        on(later)
        assert choose(**padded) == "cudnn"
    on("7.5")
    assert choose() == choose(**padded) == "xla"


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "sixteenths"), [(8192, (8, 16)), (8192, ()), (4096, (8, 16))])
def test_long_dense_prompts_of_many_lengths_run_on_the_kernel(tokens, sixteenths, on, monkeypatch):
    """cuDNN computes the rows of padding; it is as fast in programs of one length."""
    on("9.0")
    asked = []

    def attend(query, *_, **__):
        asked.append(query.shape)
        return query

    monkeypatch.setattr(cudnn, "attend_dense", attend)
    model = dataclasses.replace(
        tiny.MODEL, head_dim=64, max_position_embeddings=8192, dtype="bfloat16"
    )
    settings = Settings(policy=Dense(), model_config=model, sixteenths=sixteenths)
    prompt = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    read = functools.partial(read_into_new_cache, settings=settings)
    traced = str(jax.make_jaxpr(read)(param_shapes(model), *prompt))
    is_kernel = bool(sixteenths) and tokens > 4096
    assert ("hopper_attention_kernel" in traced, bool(asked)) == (is_kernel, not is_kernel)


def test_the_interpreter_needs_no_gpu_and_comes_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: False)
    query = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float16)
    options = {"block_size": 64, "kernel_config": KernelConfig(interpret=True)}
    assert choose_implementation("mosaic_gpu", query, **options) == "mosaic_gpu"
    assert choose_implementation(None, query, **options) == "xla"


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [
        ("cpu", None, None),
        ("tpu", None, None),
        ("gpu", "7.5", None),
        ("gpu", "8.0", "ampere"),
        ("gpu", "8.6", "ampere"),
        ("gpu", "8.9", "ampere"),
        ("gpu", "9.0", "hopper"),
        ("gpu", "10.0", "ampere"),
        ("gpu", "12.0", "ampere"),
        ("gpu", "gfx942", None),
        ("gpu", None, None),
    ],
)
def test_each_gpu_has_kernels_of_its_own(backend, capability, expected, monkeypatch):
    device = type("Device", (), {"compute_capability": capability} if capability else {})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert dispatch.kernels_here() == expected
    assert dispatch.is_hopper() == (expected == "hopper")
    assert dispatch._is_ampere_or_later() == (expected is not None)


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0", "12.0"])
def test_what_runs_on_a_gpu_depends_on_its_capability(capability, on):
    on(capability)
    expected = "xla" if capability == "7.5" else "mosaic_gpu"
    for phase, tokens in (("prefill", 128), ("decode", 1)):
        query = jax.ShapeDtypeStruct((2, tokens, 4, 128), jnp.float16)
        assert choose_implementation(None, query, block_size=64) == expected
        assert choose_implementation("xla", query, block_size=64) == "xla"
        if expected == "xla":
            words = rf"compute capability 8\.0 .* in {phase}, not GPU {capability}"
            with pytest.raises(NotImplementedError, match=words):
                choose_implementation("mosaic_gpu", query, block_size=64)
    pages = jax.ShapeDtypeStruct((1, 64, 2, 96), jnp.bfloat16)
    assert choose_implementation(None, pages, block_size=16, row_size=64) == expected
    for what in ("selection", "prompt selection", "token selection", "linear layers"):
        has_kernel = capability == "9.0" or (what != "selection" and capability != "7.5")
        assert (dispatch.selection_kernels(None, what=what) is not None) == has_kernel
        found = dispatch.row_kernels(None, on_one_device=True, what=what)
        assert (found is not None) == has_kernel
        assert dispatch.row_kernels(None, on_one_device=False, what=what) is None
        assert dispatch.row_kernels("xla", on_one_device=True, what=what) is None
    assert (dispatch.selection_kernels(None, what="float8 SwiGLU") is not None) == (
        capability == "9.0"
    )


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_xla_decodes_heads_that_a_kernel_would_pad(head_dim, on):
    on("9.0")
    dense = functools.partial(dispatch.choose_dense_implementation, num_keys=128, has_offset=True)
    token, piece = (jax.ShapeDtypeStruct((2, x, 4, head_dim), jnp.bfloat16) for x in (1, 64))
    for choose in (functools.partial(choose_implementation, block_size=16), dense):
        if head_dim in (64, 128):
            assert choose(None, query=token) == choose("mosaic_gpu", query=token) == "mosaic_gpu"
            continue
        assert choose(None, query=token) == "xla"
        words = f"head_dim of 64 or 128 in decode, not {head_dim}"
        with pytest.raises(NotImplementedError, match=words):
            choose("mosaic_gpu", query=token)
    assert dense(None, query=piece) == "mosaic_gpu"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(SketchWalkConfig.recommended(), {"prefill", "decode"}), (SketchWalkConfig.paper(), set()),
     (Dense(), set())],
)  # fmt: skip
def test_which_phases_select_by_kernels_from_ampere_on(policy, expected, on):
    settings = LayerSettings(policy=policy, on_one_device=True)
    phases = ("prefill", "decode")
    on("8.0")
    assert {x for x in phases if settings.selection_kernels(x) is not None} == expected
    assert (settings.token_kernels is not None) == bool(expected)
    assert settings.multiply_rows is not None
    on("9.0")
    assert all(settings.selection_kernels(x) is not None for x in phases)
    assert settings.token_kernels is not None and settings.multiply_rows is not None
    on("7.5")
    assert not any(settings.selection_kernels(x) for x in phases)
    assert settings.multiply_rows is sums_of_rows
    on("")  # no GPU
    assert settings.multiply_rows is None


@pytest.mark.interpreted
def test_each_gpu_gets_its_kernel_in_a_gradient_and_on_a_mesh(on):
    """Looks for the kernels in the traced programs."""
    options = {"implementation": "mosaic_gpu", "kernel_config": KernelConfig(interpret=True)}
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    lists = jax.eval_shape(lambda: full_selection(jnp.arange(2)[None, :], 2))

    def attend(query, *others):
        if query.shape[1] > 1:
            return block_sparse_attention(query, *others, **options)
        lengths = jnp.full(1, 128, jnp.int32)
        return block_sparse_decode(query, *others, kv_lengths=lengths, **options)

    def gradient(query, *others):
        return jax.grad(lambda x: attend(x, *others).astype(jnp.float32).sum())(query)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    on_mesh = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    token = jax.ShapeDtypeStruct((1, 1, 2, 64), jnp.bfloat16)
    own = jax.eval_shape(lambda: full_selection(jnp.array([[1]]), 2))
    arguments = {"prefill": (shape, shape, shape, lists), "decode": (token, shape, shape, own)}
    kernels = {
        "8.0": {"prefill": "attention_kernel", "decode": "block_sparse_decode"},
        "9.0": {"prefill": "hopper_attention_kernel", "decode": "block_sparse_decode"},
    }
    for capability, wanted in kernels.items():
        on(capability)
        for phase, function in itertools.product(arguments, (gradient, on_mesh)):
            jax.clear_caches()  # traces are cached: a real process has one kind of GPU
            text = str(jax.make_jaxpr(function)(*arguments[phase]))
            found = set(re.findall(r"=(\w*attention_kernel|block_sparse_decode)\b", text))
            assert found == {wanted[phase]}, (capability, phase, function)


def test_a_shard_map_that_checks_what_varies_gets_kernels_that_can_be_traced_there(on):
    on("9.0")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    query = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    found = {}
    for check_vma in (True, False):

        def inside(x, found=found, check_vma=check_vma):
            pages = choose_implementation(None, query, block_size=16, row_size=64)
            blocks = choose_implementation(None, query, block_size=64)
            selects = dispatch.selection_kernels(None) is not None
            found[check_vma] = pages, blocks, selects
            return x

        where = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": check_vma}
        jax.eval_shape(jax.shard_map(inside, **where), jnp.ones(1))
    kernel = "mosaic_gpu"
    assert found == {True: ("xla", kernel, False), False: (kernel, kernel, True)}


@pytest.mark.slow
def test_a_checkpoint_in_float16_runs_from_load_to_generate_on_a_gpu_before_ampere(on, tmp_path):
    on("7.5")
    model = dataclasses.replace(tiny.MODEL, num_layers=1)
    save(tmp_path, tiny.params(jnp.float32, model), model)
    params, model = load(tmp_path, dtype="float16")
    tokens, _ = tiny.prompts(70)
    policy = SketchWalkConfig.recommended(density=0.5, dense_layers=0)
    found = generate(params, tokens, model_config=model, policy=policy, max_new_tokens=2)
    assert model.dtype == "float16" and found.cache.key.dtype == jnp.float16
    assert found.is_finite.all() and found.tokens.shape == (1, 2)


@pytest.mark.unchecked
def test_asking_for_kernels_where_they_cannot_run_says_why(on):
    on("")
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    selection = full_selection(jnp.zeros((1, 1), jnp.int32), 1)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' cannot run here: it .* 'xla' can"):
        block_sparse_attention(x, x, x, selection, implementation="mosaic_gpu")
    x = jnp.zeros((1, 4, 2, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run here: it .* 'xla' can"):
        dense_attention(x, x, x, implementation="cudnn")
    with pytest.raises(ValueError, match="implementation must be None or one of "):
        dense_attention(x, x, x, implementation="flash")


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_interpret_is_true_or_false(value):
    with pytest.raises(ValueError, match="interpret must be True or False"):
        KernelConfig(interpret=value)


@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize("interpret", [True, False])
def test_selection_follows_attention(is_hopper, interpret, monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: is_hopper)
    config = KernelConfig(interpret=interpret)
    found = [dispatch.selection_kernels(x, config) for x in (None, "xla", "mosaic_gpu")]
    by_itself = config if is_hopper and not interpret else None
    assert found == [by_itself, None, config if is_hopper or interpret else None]


@pytest.mark.parametrize("implementation", ["xla", None])
def test_what_is_asked_reaches_the_policy(implementation, monkeypatch):
    jax.clear_caches()  # only tracing calls the policy
    asked, seen, answer = [], [], KernelConfig(row_tile=3)

    def selection_kernels(*arguments, what="selection"):
        asked.append((*arguments, what))
        return answer

    def watch(method):
        def watched(*arrays, kernel_config=None, **options):
            seen.append(kernel_config)
            return method(*arrays, **options)

        return watched

    for name in ("update_statistics", "select"):
        method = getattr(SketchWalkConfig, name)
        monkeypatch.setattr(SketchWalkConfig, name, watch(method))
    for module in ("layer", "cached_layer"):
        monkeypatch.setattr(
            f"sketchwalk_jax.inference.{module}.selection_kernels", selection_kernels
        )
    config, sizes = SketchWalkConfig.paper(block_size=16), KernelConfig(row_tile=2)
    options = {"implementation": implementation, "kernel_config": sizes}
    x = jnp.ones((1, 32, 2, 16), jnp.float32)
    attend = functools.partial(sketchwalk_attention, policy=config, **options)
    jax.eval_shape(attend, x, x, x, init_walk(1, 32, policy=config))
    options |= {"model_config": tiny.MODEL, "policy": config, "max_new_tokens": 1}
    run = functools.partial(generate, **options)
    jax.eval_shape(run, jax.eval_shape(tiny.params), jnp.asarray(tiny.prompts(20)[0]))
    assert set(asked) == {(implementation, sizes, "selection")}
    assert len(seen) == 6 and set(seen) == {answer}
