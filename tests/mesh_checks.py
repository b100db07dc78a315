"""Checks of meshes, run by tests in a process with eight pretended devices.

Each `check_...` raises an error where a claim does not hold. As a program, this file reads calls of
checks, one JSON line each, and answers each with a line: a traceback, or null.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from evaluation_samples import sample
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny import MODEL, params, prompts
from tolerances import tolerance

import sketchwalk_jax as sw
from sketchwalk_jax import KernelConfig, sharding
from sketchwalk_jax.attention.mass import block_mass
from sketchwalk_jax.calibration import calibrate, fit_thresholds
from sketchwalk_jax.evaluation import EvaluationConfig, evaluate_model, measure
from sketchwalk_jax.evaluation.measure import Measurement, check_devices
from sketchwalk_jax.evaluation.planning import make_plan
from sketchwalk_jax.evaluation.prompts import make_prompts
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.flax import WalkAttention, WalkSelfAttention
from sketchwalk_jax.inference import generation, steps
from sketchwalk_jax.inference.cache import sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings, attention_by_layer, layer_attention
from sketchwalk_jax.models import ModelConfig, init_params, load, quantize_params, save
from sketchwalk_jax.models.experts import mixture
from sketchwalk_jax.models.norm import rms_norm
from sketchwalk_jax.models.params import EXPERTS, flatten_params, param_shapes
from sketchwalk_jax.models.quantized import gate_plainly
from sketchwalk_jax.models.tensor_files import TensorFiles
from sketchwalk_jax.models.weights import find_sources, read_shard
from sketchwalk_jax.pallas_kernels.decode_matmul.api import DecodeMatmul
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.policies.quest import QuestConfig
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.selection import full_selection
from sketchwalk_jax.sharding import Placement, lies_on_one_device, place, whole_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestForAll(QuestConfig):
    """A policy without support for meshes, with a list for each head."""

    heads_on_mesh = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleForAll(OracleConfig):
    """A policy without support for meshes, which reads the cache."""

    heads_on_mesh = "all"


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SIZE = 16
MESH_MODEL = dataclasses.replace(MODEL, num_layers=3, num_heads=8, num_kv_heads=4)
MESH_EXPERTS = dataclasses.replace(tiny.EXPERTS, num_layers=3, num_heads=8, num_kv_heads=4)
_SPARSE: dict[str, Any] = {"block_size": SIZE, "dense_layers": 1}
_SKETCH = _SPARSE | {"sketch_dim": 8, "density": 0.4}
POLICIES: dict[str, Policy] = {
    "dense": sw.Dense(block_size=SIZE),
    "paper": sw.SketchWalkConfig.paper(**_SKETCH),
    "damped": sw.SketchWalkConfig.damped(**_SKETCH),
    "one_hop": sw.SketchWalkConfig.one_hop(**_SKETCH),
    "released": sw.SketchWalkConfig.released(**_SPARSE),
    "whole_blocks": sw.SketchWalkConfig.recommended(
        block_size=SIZE,  # one page
        density=0.5,
        min_tokens=2 * SIZE,
        local_tokens=0,
        early_representatives=(),
    ),
    "recommended": sw.SketchWalkConfig.recommended(
        block_size=2 * SIZE,  # two pages
        density=0.5,
        min_tokens=2 * SIZE,
        local_tokens=0,
        early_representatives=((64, 16),),
    ),
    "oracle": by_name("oracle", **_SPARSE, density=0.4),
    "oracle_max": by_name("oracle", **_SPARSE, density=0.4, aggregation="max"),
    "quest": by_name("quest", **_SPARSE, density=0.4),
    "adamas": by_name("adamas", **_SPARSE, density=0.4),
    "minference": by_name("minference", **_SPARSE, scale=0.02),
    "flexprefill": by_name("flexprefill", **_SPARSE, min_budget=SIZE),
    "streaming": by_name("streaming", **_SPARSE, density=0.4),
    "random": by_name("random", **_SPARSE, density=0.4),
    "quest_for_all": QuestForAll(**_SPARSE, density=0.4),
    "oracle_for_all": OracleForAll(**_SPARSE, density=0.4),
}


def placement(model: ModelConfig = MESH_MODEL, **axes: int) -> Placement:
    """Plans a mesh with these axes, on as many devices as it needs."""
    devices = jax.devices()[: math.prod(axes.values())]
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    return place(mesh, model)


def assert_ranks_agree(x: jax.Array) -> None:
    """Checks that devices with the same part of an array hold the same bits."""
    parts: dict[str, np.ndarray] = {}
    for shard in x.addressable_shards:
        own = np.asarray(shard.data)
        np.testing.assert_array_equal(parts.setdefault(str(shard.index), own), own)


# Attention only, without a model.

_LENGTHS = (100, 37, 64, 80)
_WIDTH = 128  # columns of the prompts


def _attend(policy: Policy, where: Placement | None, dtype: Any, arrays: Any) -> Any:
    """Computes lists and outputs of every layer, for prompts and for one token after each."""
    model, size = MESH_MODEL, policy.block_size
    settings = Settings(model_config=model, policy=policy, return_selection=True, placement=where)
    lengths = jnp.asarray(_LENGTHS, jnp.int32)
    blocks = None if where is None else where.blocks

    join = functools.partial(blocks.join, axis=3) if blocks is not None else None

    @jax.jit
    def run(prompt: Any, token: Any) -> Any:
        cache = sw.init_cache(
            model, policy, batch=len(_LENGTHS), max_tokens=128, dtype=dtype, sharding=where
        )
        if blocks is not None:
            more = -prompt[0].shape[2] % (size * blocks.num_pieces)
            widths = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))
            prompt = [blocks.deal(jnp.pad(x, widths), axis=2) for x in prompt]
        width = prompt[0].shape[2]
        columns = jnp.arange(width, dtype=jnp.int32)[None]
        first = jnp.zeros_like(lengths)
        spans = (
            Span(first, columns < lengths[:, None], lengths, lengths),
            Span.of_tokens(lengths, size),
        )
        found = []
        for span, inputs in zip(spans, (prompt, token), strict=True):
            rows = 1 if span.is_token else width // size
            state: Any = (
                cache,
                policy.init_walk(
                    batch=len(_LENGTHS), num_rows=rows, num_blocks=cache.capacity // size
                ),
            )
            make = functools.partial(
                layer_attention, span, is_fresh=not span.is_token, settings=settings
            )
            for part, attend in attention_by_layer(make, settings):

                def step(state: Any, layer: Any, attend: Any = attend) -> Any:
                    query, key, value, index = layer
                    out, state, aux = attend(query, key, value, index, state)
                    return state, (out, aux)

                numbers = jnp.arange(part.start, part.stop, dtype=jnp.int32)
                own = [x[part.start : part.stop] for x in inputs]
                state, (out, (pairs, lists)) = jax.lax.scan(step, state, (*own, numbers))
                if blocks is not None and not span.is_token:
                    out, lists = blocks.join(out, axis=2), jax.tree.map(join, lists)
                    out = out[:, :, :_WIDTH]
                    lists = jax.tree.map(lambda x: x[:, :, :, : _WIDTH // size], lists)
                found.append((out, (pairs, lists)))
            cache = state[0]
        return found

    return run(*arrays)


def check_lists(names: list[str], axes: dict[str, int], dtype: str = "float32") -> None:
    """Checks that lists on every rank equal one device's, bit for bit, for the same inputs."""
    rng = np.random.default_rng(0)
    c, batch = MESH_MODEL, len(_LENGTHS)

    def draw(tokens: int) -> tuple[jax.Array, ...]:
        heads = c.num_heads, c.num_kv_heads, c.num_kv_heads
        return tuple(
            jnp.asarray(rng.standard_normal((c.num_layers, batch, tokens, n, c.head_dim)), dtype)
            for n in heads
        )

    arrays = draw(_WIDTH), draw(1)
    for name in names:
        plain = _attend(POLICIES[name], None, dtype, arrays)
        shared = _attend(POLICIES[name], placement(**axes), dtype, arrays)
        for (out, (pairs, lists)), (own, (own_pairs, own_lists)) in zip(plain, shared, strict=True):
            assert (lists is None) == (own_lists is None), name
            for expected, x in zip(jax.tree.leaves(lists), jax.tree.leaves(own_lists), strict=True):
                np.testing.assert_array_equal(expected, x, err_msg=name)
                assert_ranks_agree(x)
            wide = [np.asarray(x, np.float32) for x in (out, own)]
            for row, length in enumerate(_LENGTHS if out.shape[2] > 1 else (1,) * batch):
                np.testing.assert_allclose(
                    *(x[:, row, :length] for x in wide), **tolerance("logits", dtype)
                )
            np.testing.assert_allclose(pairs, own_pairs, rtol=1e-6)


# Whole models.


def check_model(
    names: list[str], axes: dict[str, int], *, has_experts: bool = False, **options: Any
) -> None:
    """Checks that a mesh gives one device's logits, lists and tokens, drawn and streamed too."""
    model = MESH_EXPERTS if has_experts else MESH_MODEL
    where = placement(model, **axes)
    plain = params(model=model)
    spread = jax.device_put(plain, where.params)
    tokens, lengths = prompts(*_LENGTHS)
    for name in names:
        common: dict[str, Any] = {"model_config": model, "policy": POLICIES[name]}
        common |= {"lengths": lengths, **options}
        logits = [sw.forward(x, tokens, **common) for x in (plain, spread)]
        _assert_close(*logits)
        # Twenty tokens cross a block boundary in every sequence.
        call = common | {"max_new_tokens": 20, "max_tokens": 128, "return_selection": True}
        draws = sw.Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3)
        for sampling in (None, draws):
            call["sampling"] = sampling
            one, many = (sw.generate(x, tokens, **call) for x in (plain, spread))
            np.testing.assert_array_equal(one.tokens, many.tokens, err_msg=f"{name} {sampling}")
            lists = (jax.tree.leaves(x.selection) for x in (one, many))
            for expected, found in zip(*lists, strict=True):
                np.testing.assert_array_equal(expected, found, err_msg=name)
            densities = one.measured_density.overall, many.measured_density.overall
            np.testing.assert_allclose(*densities, rtol=1e-6)
        assert many.tokens.is_fully_replicated
        assert many.cache.key.sharding == where.cache(POLICIES[name])["key"]
        # A program takes the state that it returned: the pieces of a stream compile nothing.
        compiled = generation._start._cache_size(), generation._continue._cache_size()
        chunks = list(sw.stream(spread, tokens, every=7, **call))
        assert compiled == (generation._start._cache_size(), generation._continue._cache_size())
        streamed = np.concatenate([chunk.tokens for chunk in chunks], axis=1)
        np.testing.assert_array_equal(streamed, many.tokens)


def check_steps(name: str, axes: dict[str, int]) -> None:
    """Checks a prompt in two pieces and a decode step, with and without a caller's `jit`."""
    where, policy = placement(**axes), POLICIES[name]
    plain = params(model=MESH_MODEL)
    common: dict[str, Any] = {"model_config": MESH_MODEL, "policy": policy}
    tokens, _ = prompts(44, 44, 44, 44)

    def run(weights: Any, sharding: Placement | None) -> Any:
        cache = sw.init_cache(MESH_MODEL, policy, batch=4, max_tokens=64, sharding=sharding)
        first, cache = sw.prefill(weights, tokens[:, :24], cache, **common)
        second, cache = sw.prefill(weights, tokens[:, 20:], cache, **common)
        return first, second, sw.decode_step(weights, tokens[:, 0], cache, **common)[0]

    expected, spread = run(plain, None), jax.device_put(plain, where.params)
    step = jax.jit(lambda weights: run(weights, where))
    assert "shard_map" in str(step.trace(spread).jaxpr)
    for found in (run(spread, where), step(spread)):
        for one, many in zip(expected, found, strict=True):
            np.testing.assert_allclose(one, many, **tolerance("logits"))


def check_products(axes: dict[str, int]) -> None:
    """Checks decode matmuls of each rank with its share of the weights, without the kernel."""
    where, c = placement(**axes), MESH_MODEL
    plain = params(model=c)
    layers = plain["layers"]

    def multiply(x: Any, weights: Any, layer: Any, **options: Any) -> Any:
        if options["scale"] is not None:
            x = rms_norm(x, options["scale"][layer], eps=options["eps"])
        equation = "btd,fd->btf" if options["is_transposed"] else "btd,df->btf"
        return [
            jnp.einsum(equation, x, one[layer], precision="highest") for one in weights.values()
        ]

    sharding.linear_of_rows = multiply
    kernel = DecodeMatmul(multiply, lambda *_, **__: None, False)
    sharding.choose_decode_matmul = lambda *, are_quantized: kernel
    hidden, embedding = c.hidden_size, {"kernel": plain["embed"]["embedding"][None]}
    for names, norm, inputs in (
        (("query", "key", "value"), "attn_norm", hidden),
        (("gate", "up"), "mlp_norm", hidden),
        (("out",), None, c.num_heads * c.head_dim),
        (("down",), None, c.intermediate_size),
        (("embed",), None, hidden),
    ):
        is_transposed = names == ("embed",)
        kernels = {name: layers.get(name, embedding)["kernel"] for name in names}
        shape = (c.vocab_size, inputs) if is_transposed else (inputs, -1)
        stacks = {name: one.reshape(len(one), *shape) for name, one in kernels.items()}
        x = jax.random.normal(jax.random.key(1), (4, 1, inputs))
        layer = jnp.asarray(0 if is_transposed else 2, jnp.int32)
        scale = None if norm is None else layers[norm]["scale"]
        options: dict[str, Any] = {"scale": scale, "eps": 1e-5, "is_transposed": is_transposed}
        expected = multiply(x, stacks, layer, **options)
        options |= {"placement": where, "kernel_config": KernelConfig()}
        call = functools.partial(sharding.linear_on_ranks, weights=stacks, **options)
        for one, other in zip(expected, jax.jit(call)(x, layer=layer), strict=True):
            np.testing.assert_allclose(one, other, **tolerance("logits"), err_msg=str(names))


def check_mixture(axes: dict[str, int]) -> None:
    """Checks that ranks share tokens and experts of prompts and tokens, also for gradients."""
    where, c, layer = placement(MESH_EXPERTS, **axes), MESH_EXPERTS, jnp.ones((), jnp.int32)
    plain = {name: params(model=c)["layers"][name] for name in EXPERTS}
    for weights, width in ((None, 32), ("int8", 1)):
        stacks = quantize_params({"layers": plain}, weights)["layers"] if weights else plain
        x = jax.random.normal(jax.random.key(1), (4, width, c.hidden_size))
        is_token = jnp.arange(width)[None] < jnp.array([32, 20, 1, 0])[:, None]

        def run(mix: Any, x: Any, stacks: Any, is_token: Any = is_token) -> Any:
            out = mix(x, is_token, stacks, layer)
            return jnp.sum(jnp.sin(out)), out

        mixes = (
            functools.partial(mixture, model_config=c),
            functools.partial(
                sharding.mixture_on_ranks, placement=where, model_config=where.model_config
            ),
        )
        found = []
        for mix in mixes:
            own = functools.partial(run, mix)
            own = own if weights else jax.value_and_grad(own, (0, 1), has_aux=True)
            found.append(jax.jit(own)(x, stacks))
        for one, many in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-4)
            assert_ranks_agree(many)
        out = found[1][1] if weights else found[1][0][1]
        assert not np.any(out[~is_token]) and np.all(np.any(out[is_token], axis=-1))


def check_gated_rows(axes: dict[str, int]) -> None:
    """Checks that each rank applies SwiGLU to its own rows, with plain JAX for the kernel."""
    where, asked = placement(**axes), list[tuple[int, ...]]()

    def gate(*arrays: Any, kernel_config: Any) -> Any:
        asked.append(arrays[0].shape)
        return gate_plainly(*arrays)

    sharding.swiglu_quantize = gate
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (4, 32, 64), (4, 32, 64), (4, 32), (64,), (64,)
    drawn = [jax.random.normal(*one) for one in zip(keys, shapes, strict=True)]
    drawn[:2] = [x.astype(jnp.bfloat16) for x in drawn[:2]]
    call = functools.partial(
        sharding.gate_on_ranks, placement=where, kernel_config=KernelConfig(interpret=True)
    )
    text = jax.jit(call).lower(*drawn).compile().as_text()
    assert text is not None and not collectives(text)
    for one, other in zip(jax.jit(gate_plainly)(*drawn), jax.jit(call)(*drawn), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-3, atol=1e-6)
    shape = (4 // axes.get("data", 1), 32 // axes.get("sequence", 1), 64)
    assert set(asked) == {shape}
    assert call(*(x[..., :60] if x.shape[-1] == 64 else x for x in drawn)) is None


def _assert_close(one: jax.Array, many: jax.Array) -> None:
    """Compares logits of the prompts' real tokens, to the tolerance."""
    for row, length in enumerate(_LENGTHS):
        rows = (np.asarray(x)[row, :length] for x in (one, many))
        np.testing.assert_allclose(*rows, **tolerance("logits"))


def collectives(text: str) -> list[tuple[str, int]]:
    """Returns kind and result bytes of every collective in a compiled program, in order."""
    sizes = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
    found = []
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for shapes, kind in re.findall(rf"= (\(?[\w\[\],{{}} ]+\)?) ({kinds})(?:-start)?\(", text):
        for name, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            found.append((kind, sizes[name] * math.prod(int(x) for x in dims.split(",") if x)))
    return found


def check_bytes(names: list[str], axes: dict[str, int], *, has_experts: bool = False) -> None:
    """Checks that programs send what `sharding` says, and nothing else of size."""
    c = MESH_EXPERTS if has_experts else MESH_MODEL
    where = placement(c, **axes)
    spread = jax.device_put(params(model=c), where.params)
    batch, capacity, numbers = 4, 128, jnp.ones((4,), jnp.int32)
    for name in names:
        policy = POLICIES[name]
        settings = Settings(model_config=c, policy=policy, placement=where)
        cache = sw.init_cache(c, policy, batch=batch, max_tokens=capacity, sharding=where)
        token = steps._decode.lower(spread, numbers, cache, active=numbers > 0, settings=settings)
        programs = [(1, False, token)]
        for is_fresh in (True, False) if where.blocks else (True,):
            lengths, tokens = numbers * capacity, jnp.zeros((batch, capacity), jnp.int32)
            # After a cache a prompt may begin inside a block, and so touches one more.
            tokens = tokens if is_fresh else tokens[:, : capacity - SIZE + 1]
            prompt = steps._prefill.lower(
                spread, tokens, lengths, cache, is_fresh=is_fresh, settings=settings
            )
            programs.append((capacity, is_fresh, prompt))
        for width, is_fresh, lowered in programs:
            found = collectives(lowered.compile().as_text())
            # Leave out small arrays: lengths, and attended pairs of every layer.
            every = found, _sent(name, where, batch, width, capacity, is_fresh)
            large, said = ([x for x in one if x[1] > 4 * c.num_layers * batch] for one in every)
            assert sorted(large) == sorted(said), (name, width, every)


def _sent(
    name: str, where: Placement, batch: int, width: int, capacity: int, is_fresh: bool
) -> list[tuple[str, int]]:
    """Returns a program's collectives in float32 for `width` tokens per sequence, 1 for decode."""
    c, policy = where.model_config, POLICIES[name]
    data, sequence, tensor = (where.size(axis) for axis in ("data", "sequence", "tensor"))
    is_token, own = width == 1, batch // data * 4  # bytes of one float per sequence of a rank
    columns = 1 if is_token else width // sequence
    heads, kv_heads = c.num_heads // tensor, c.num_kv_heads // tensor
    sparse = len(sparse_layers(c, policy))
    ranges = 1 + (0 < sparse < c.num_layers)  # a loop over layers for each range
    reduced, gathered = [], []
    if tensor > 1:
        kinds = 1 + bool(c.mlp_layers) + bool(c.expert_layers)  # attention, mlp, experts
        reduced += [own * columns * c.hidden_size] * (kinds * ranges + 1)  # with embeddings
        gathered += [own * c.vocab_size]  # logits
    if sequence > 1 and is_token:
        reduced += [own * heads * c.head_dim, own * heads, own * heads] * ranges
    elif sequence > 1:
        reduced += [own * c.hidden_size]  # tokens whose logits are returned
        of_a_token = own * kv_heads * c.head_dim
        gathered += [of_a_token * width] * (2 * ranges)
        gathered += [] if is_fresh else [of_a_token * capacity] * (2 * ranges)
    rows, blocks = 1 if is_token else width // SIZE, capacity // SIZE
    if name == "paper":
        if tensor > 1:
            by_head = own * columns * c.head_dim
            gathered += [by_head * c.num_heads, by_head * c.num_kv_heads]
        if sequence > 1 and not is_token:
            gathered += [own * rows * 8] * 2  # sketches of queries and of keys
    if name == "whole_blocks" and tensor > 1:
        pieces = 2 if sequence > 1 and not is_token else 1
        of_a_row = own * c.num_heads * (1 if is_token else 8) * blocks
        gathered += [of_a_row * rows // (sequence if pieces > 1 else 1) // pieces] * pieces
    return [("all-reduce", x) for x in reduced] + [("all-gather", x) for x in gathered]


# Loading.


def check_loading(directory: str, saved: str) -> None:
    """Checks that each rank reads its share once, and that saved arrays load where they lay."""
    config = ModelConfig.from_pretrained(directory)
    where, by_two = placement(config, data=2, tensor=4), placement(config, tensor=2)
    read: list[int] = []
    plain_read = TensorFiles.read
    limit = sys.maxsize

    def counting(files: TensorFiles, name: str, *bounds: slice) -> np.ndarray:
        if len(read) == limit:
            raise KeyboardInterrupt
        found = plain_read(files, name, *bounds)
        read.append(found.nbytes)
        return found

    def check_placed(params: Any, where: Placement, wanted: Any) -> None:
        wanted = flatten_params(wanted)
        for path, leaf in flatten_params(params).items():
            assert leaf.sharding == where(path, leaf), path
            np.testing.assert_array_equal(leaf, wanted[path])

    whole, _ = load(directory)
    assert lies_on_one_device(whole)
    known: list[bool] = []
    jax.eval_shape(lambda tree: known.append(lies_on_one_device(tree)), whole)
    assert known == [False]  # under a caller's `jit`, it could be anywhere
    TensorFiles.read = counting  # type: ignore[method-assign]
    params, _ = load(directory, sharding=where)
    assert not lies_on_one_device(params)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    elsewhere = jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(NotImplementedError, match="sharding.place says, .*, got 8 devices; load"):
        check_devices(elsewhere, config)
    del elsewhere
    total = sum(x.nbytes for x in jax.tree.leaves(whole))
    assert sum(read) == total, (sum(read), total)
    check_placed(params, where, whole)
    # An interrupted load leaves nothing on any device.
    held, limit = len(jax.live_arrays()), 20
    read.clear()
    with pytest.raises(KeyboardInterrupt):
        load(directory, sharding=where)
    gc.collect()
    assert len(jax.live_arrays()) == held
    limit = sys.maxsize
    # Each rank reads no more than its share, as a process with one device does.
    sources = find_sources(config)
    with TensorFiles(Path(directory)) as files:
        for device in jax.devices():
            read.clear()
            share = 0
            for path, shape in flatten_params(param_shapes(config)).items():
                index = where(path, shape).devices_indices_map(shape.shape)[device]
                part = read_shard(
                    files, sources[path], shape.shape, index, shape.dtype, advance=lambda _: None
                )
                share += part.nbytes
            assert sum(read) == share < 0.3 * total, (sum(read), share, total)
    TensorFiles.read = plain_read  # type: ignore[method-assign]
    save(saved, params, config)
    for other in (where, by_two):
        check_placed(load(saved, sharding=other)[0], other, whole)
    # Random weights are drawn where they are placed, and are the same for every sharding.
    drawn, others = (init_params(jax.random.key(0), config, sharding=x) for x in (where, by_two))
    check_placed(drawn, where, others)
    kernel = np.asarray(drawn["layers"]["gate"]["kernel"], np.float32)
    np.testing.assert_allclose(kernel.std() * math.sqrt(config.hidden_size), 1.0, atol=0.05)


# Evaluations.


def check_eight_bits(directory: str, weights: str) -> None:
    """Checks that ranks quantize weights as one device does, when loaded or later."""
    options = {"dtype": "float32", "progress": False}
    whole, model = load(directory, weights=weights, **options)
    where = placement(model, tensor=2)
    wide, _ = load(directory, sharding=where, **options)
    read, _ = load(directory, weights=weights, sharding=where, **options)
    shapes = flatten_params(param_shapes(model, weights=weights))
    for made in (read, quantize_params(wide, weights)):
        for path, array in flatten_params(made).items():
            assert array.sharding.is_equivalent_to(where(path, shapes[path]), array.ndim), path
            wanted = flatten_params(whole)[path]
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(
                np.asarray(array, np.float32), np.asarray(wanted, np.float32), err_msg=str(path)
            )
    tokens = np.arange(20, dtype=np.int32)[None]
    given = {"model_config": model, "policy": sw.Dense()}
    one, two = (sw.forward(tree, tokens, **given) for tree in (whole, read))
    # A sum that rounds differently can change an activation by one step of its eight bits.
    np.testing.assert_allclose(one, two, atol=0.05 * float(np.std(one)))


def check_evaluation(
    rules: list[Rule],
    axes: dict[str, int],
    *,
    parts: tuple[str, ...] = ("answers", "probes"),
    phases: tuple[str, ...] = ("decode", "both"),
) -> None:
    """Checks that answers, probes and long decoding give what they give on one device."""
    model, answers = MESH_MODEL, list[np.ndarray]()

    def note(prompts: Any, first: np.ndarray, likeliest: np.ndarray, *_: Any) -> np.ndarray:
        fed = np.arange(likeliest.shape[1]) < prompts.num_steps[:, None]
        answers.append(np.concatenate([first[:, None], np.where(fed, likeliest, 0)], axis=1))
        return np.zeros(len(prompts.samples), bool)

    measure.right_in_decode = note  # there is no tokenizer
    tokens = np.random.default_rng(3).integers(2, 64, 240).astype(np.int32)
    # The decoded tokens cross block boundaries.
    text = Sample("long_decode", tokens, 200, tokens[200:], 200, "")
    found, said, plain = [], [], params(model=model)
    for where in (None, placement(**axes)):
        weights = plain if where is None else jax.device_put(plain, where.params)
        batch, before = whole_batch(3, where), len(answers)
        one, calls = Measurement(weights, model, batch=batch), list[tuple[str, Any]]()
        for task in ("multi_key", "text_loss"):
            some = [sample(task, seed, length=150 + 31 * seed) for seed in range(3)]
            drawn = make_prompts(some, batch=batch, num_tokens=256)
            calls.append(("answers", functools.partial(one.run, drawn, tokenizer=None)))
        first = make_prompts(some[:1], batch=1, num_tokens=256)
        calls.append(("probes", functools.partial(one.probe, first)))
        calls.append(("long", functools.partial(one.run_long, [text, text], num_tokens=256)))
        found.append(
            [
                (part, rule, phase, outcome)
                for part, call in calls
                for rule, own in ({DENSE: ("both",)} | dict.fromkeys(rules, phases)).items()
                if part in parts
                for phase, outcome in call(rule=rule, phases=own).items()
            ]
        )
        said.append([x[:3] for x in answers[before:]])
    np.testing.assert_array_equal(*said)
    for (part, *key, outcome), (*other, spread) in zip(*found, strict=True):
        assert [part, *key] == other
        allowed = tolerance("logits") if part == "answers" else {"rtol": 1e-4, "atol": 1e-6}
        leaves = (jax.tree.leaves(dataclasses.astuple(x)) for x in (outcome, spread))
        for x, y in zip(*leaves, strict=True):
            np.testing.assert_allclose(x, y, **allowed, err_msg=str(other))


def check_calibration(axes: dict[str, int], *, has_threshold: bool = True) -> None:
    """Checks that fitted thresholds and plans match one device."""
    model, where = MESH_MODEL, placement(**axes)
    rows, lengths = prompts(250, 200, 222)
    plain, found = params(model=model), []
    for weights in (plain, jax.device_put(plain, where.params)):
        options: dict[str, Any] = {"model_config": model}
        policy: Any = POLICIES["adamas"]
        fitted = fit_thresholds(weights, rows, lengths, policy=policy, **options)
        own = [np.array(fitted.thresholds)]
        if has_threshold:
            policy = POLICIES["flexprefill"]
            set_to = calibrate(weights, rows, lengths, policy=policy, density=0.5, **options)
            own.append(np.array(set_to.tried))
        small = RecommendedConfig(block_size=16, min_tokens=64)
        made = make_plan(weights, [rows[0]], policy=small, densities=(0.2, 0.4, 0.6), **options)
        own += [np.array([*made.densities, *made.errors, made.weights])]
        found.append(own)
    for expected, measured in zip(*found, strict=True):
        np.testing.assert_allclose(expected, measured, rtol=2e-3)


def check_refused_evaluation() -> None:
    """Checks that a policy without support for the mesh is refused before anything runs."""
    where = placement(MESH_MODEL, sequence=2)
    config = EvaluationConfig(policies=("oracle",), tokens=(512,), tasks=("text_loss",))
    weights = jax.device_put(params(model=MESH_MODEL), where.params)
    out = Path("quality.json")
    call: dict[str, Any] = {"text": None, "model": {}, "config": config, "out": out}
    with pytest.raises(NotImplementedError, match="sequence axis must be 1 for OracleConfig"):
        evaluate_model(weights, MESH_MODEL, None, **call)
    assert not out.exists()


# The caller's own `shard_map`, and Explicit axes.

# A function of arrays, the number of leading arrays that are replicated, and the arrays.
Case = tuple[Callable[..., jax.Array], int, tuple[Any, ...]]


def _cached(policy: Policy, query: Any, key: Any, value: Any) -> jax.Array:
    """Runs a prompt and two tokens after it."""
    sizes = {"num_heads": query.shape[2], "num_kv_heads": key.shape[2], "head_dim": query.shape[3]}
    cache = sw.init_layer_cache(len(query), 64, policy=policy, **sizes)
    found, walk = [], None
    for some in (slice(None), slice(1), slice(1)):
        own = (x[:, some] for x in (query, key, value))
        out, cache, walk = sw.sketchwalk_cached_attention(
            *own, cache, walk if len(found) == 2 else None, policy=policy
        )
        found.append(out)
    return jnp.concatenate(found, axis=1)


def _scanned(policy: Policy, query: Any, key: Any, value: Any) -> jax.Array:
    """Runs layers in a scan with the walk in its carry."""

    def layer(carry: Any, scale: Any) -> Any:
        query, walk = carry
        out, walk = sw.sketchwalk_attention(query * scale, key, value, walk, policy=policy)
        return (query + out, walk), None

    walk = sw.init_walk(*query.shape[:2], policy=policy, like=(query, key, value))
    (out, _), _ = jax.lax.scan(layer, (query, walk), jnp.array([0.5, 2.0]))
    return out


def _attention_cases(policy: Policy) -> list[Case]:
    rng = np.random.default_rng(0)
    arrays = tuple(
        jnp.asarray(rng.standard_normal((2, 40, heads, 16)), jnp.float32) for heads in (4, 2, 2)
    )
    return [(functools.partial(one, policy), 0, arrays) for one in (_cached, _scanned)]


def _own_layer_case(policy: Policy) -> Case:
    """Makes a case of a `flax` layer that decodes with a cache."""
    own = WalkSelfAttention(4, 64, num_kv_heads=2, policy=policy, rngs=nnx.Rngs(0))
    graph, state = nnx.split(own)

    def run(state: Any, x: Any) -> jax.Array:
        layer = nnx.merge(graph, state)
        out, cache, _ = layer(x, cache=layer.init_cache(len(x), 64))
        return jnp.concatenate([out, layer(out[:, :1], cache=cache)[0]], axis=1)

    return run, 1, (state, jnp.asarray(np.random.default_rng(1).standard_normal((2, 40, 64)), "f"))


def _shared_walk_case() -> Case:
    """Makes a case of Flax layers that share a walk, the first of them dense."""
    walk = WalkAttention(sw.SketchWalkConfig.paper(**_SKETCH))
    layers = [
        nnx.MultiHeadAttention(2, 32, attention_fn=walk, decode=False, rngs=nnx.Rngs(seed))
        for seed in range(2)
    ]
    graph, state = nnx.split(nnx.List([walk, *layers]))

    def run(state: Any, x: Any) -> jax.Array:
        walk, *layers = nnx.merge(graph, state)
        walk.reset(*x.shape[:2])
        for layer in layers:
            x = x + layer(x, is_causal=True)
        return x

    return run, 1, (state, jnp.asarray(np.random.default_rng(2).standard_normal((2, 40, 32)), "f"))


def _model_cases(policy: Policy, model: ModelConfig = MODEL) -> list[Case]:
    common: dict[str, Any] = {"model_config": model, "policy": policy}

    def forward(weights: Any, tokens: Any) -> jax.Array:
        return sw.forward(weights, tokens, chunk_size=32, **common)

    def steps(weights: Any, tokens: Any) -> jax.Array:
        cache = sw.init_cache(model, policy, batch=len(tokens), max_tokens=64)
        _, cache = sw.prefill(weights, tokens, cache, **common)
        return sw.decode_step(weights, tokens[:, 0], cache, **common)[0]

    def generate(weights: Any, tokens: Any, temperature: Any) -> jax.Array:
        draws = sw.Sampling(temperature=temperature, top_k=5)
        call = common | {"max_new_tokens": 3, "sampling": draws}
        return sw.generate(weights, tokens, **call).tokens

    weights, tokens = params(model=model), jnp.asarray(prompts(40, 40)[0])
    cold = jnp.full((2,), 0.01)
    return [
        (forward, 1, (weights, tokens)),
        (steps, 1, (weights, tokens)),
        (generate, 1, (weights, tokens, cold)),
    ]


def _with_gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the function with gradients of its float arguments, if its output is a float."""

    def loss(*arrays: Any) -> Any:
        out = function(*arrays)
        return jnp.sum(jnp.sin(out)), out

    def run(*arrays: Any) -> Any:
        is_float = [jnp.issubdtype(jax.tree.leaves(one)[0].dtype, jnp.floating) for one in arrays]
        if not jnp.issubdtype(jax.eval_shape(function, *arrays).dtype, jnp.floating):
            return function(*arrays)
        where = tuple(index for index, one in enumerate(is_float) if one)
        return jax.grad(loss, where, has_aux=True)(*arrays)

    return run


def _assert_same(case: Case, other: Callable[..., Any], placed: tuple[Any, ...]) -> None:
    """Compares a function and its gradients on one device and on several."""
    function, _, given = case
    pair = (jax.jit(_with_gradient(one)) for one in (function, other))
    results = (jax.tree.leaves(one(*own)) for one, own in zip(pair, (given, placed), strict=True))
    for expected, found in zip(*results, strict=True):
        # Sums round in units of their largest terms, which are those of the largest entries.
        largest = np.max(np.abs(found), initial=10.0)
        np.testing.assert_allclose(expected, found, rtol=1e-4, atol=1e-5 * largest)


def _inside(case: Case, **options: bool) -> Callable[..., Any]:
    """Wraps a function in a `shard_map`; one axis of the mesh splits no array."""
    function, copies, given = case
    kinds, devices = (AxisType.Auto,) * 2, jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "other"), axis_types=kinds, devices=devices)
    spread, whole = PartitionSpec("data"), PartitionSpec()
    specs = tuple(whole if index < copies else spread for index in range(len(given)))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spread, **options)


def check_inside_shard_map(name: str, *, has_models: bool) -> None:
    """Checks that functions and gradients are the same inside a caller's `shard_map`."""
    policy = POLICIES[name]
    for case in [*_attention_cases(policy), _own_layer_case(policy)]:
        for check_vma in (True, False):
            _assert_same(case, _inside(case, check_vma=check_vma), case[2])
    if has_models:
        cases = [*_model_cases(policy), *_model_cases(policy, tiny.EXPERTS)[:2]]
        for index, case in enumerate(cases):
            # Without checks, only gradients of weights differ: one case has them all.
            for check_vma in (True, False) if index == 0 else (True,):
                _assert_same(case, _inside(case, check_vma=check_vma), case[2])


def check_types_inside_shard_map() -> None:
    """Checks, without running, that functions can be traced in a caller's `shard_map`."""
    policy = POLICIES["paper"]
    (cached, scanned), (*_, generate) = _attention_cases(policy), _model_cases(policy)
    for case in (generate, _shared_walk_case()):
        jax.eval_shape(_inside(case), *case[2])
    for case in (scanned, _model_cases(policy, tiny.EXPERTS)[0]):
        jax.make_jaxpr(_with_gradient(_inside(case)))(*case[2])

    def started(query: Any, key: Any, value: Any) -> jax.Array:
        walk = sw.init_walk(*query.shape[:2], policy=policy)
        every = frozenset({"data", "other"})
        assert jax.typeof(walk.scores).manual_axis_type.varying == every
        # Without an argument, the layer starts a walk that varies as its queries do.
        return sw.sketchwalk_attention(query, key, value, walk, policy=policy)[0]

    jax.eval_shape(_inside((started, 0, cached[2])), *cached[2])


def _explicit_mesh() -> jax.sharding.Mesh:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    assert set(mesh.axis_types) == {AxisType.Explicit}
    return mesh


def _spread(case: Case) -> tuple[Any, ...]:
    """Places a case's arrays with sequences and heads split over Explicit axes."""
    mesh, (_, copies, given) = _explicit_mesh(), case

    def place(x: Any, *axes: str | None) -> Any:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def of_weights(path: Any, x: Any) -> Any:
        return place(x, *(["tensor"] if "out" in jax.tree_util.keystr(path) else [None, "tensor"]))

    if copies:
        state, x = given
        return jax.tree_util.tree_map_with_path(of_weights, state), place(x, "data")
    return tuple(place(x, "data", None, "tensor") for x in given)


def _list_cases() -> list[Case]:
    """Returns cases of dense attention, of block lists, and of decode with lists."""
    rows = jnp.tile(jnp.arange(3, dtype=jnp.int32)[None], (2, 1))
    lists, token = (full_selection(x, 3, block_size=16) for x in (rows, rows[:, 2:]))
    lengths = jnp.array([40, 33], jnp.int32)
    ((_, _, arrays), *_) = _attention_cases(sw.Dense())
    functions: list[Callable[..., Any]] = [
        sw.dense_attention,
        lambda *x: sw.block_sparse_attention(*x, lists),
        lambda q, k, v: sw.block_sparse_decode(q[:, :1], k, v, token, kv_lengths=lengths),
    ]
    return [(function, 0, arrays) for function in functions]


def check_explicit_axes(name: str | None) -> None:
    """Checks that attention and its gradients on Explicit axes match one device."""
    cases = _list_cases()
    if name is not None:
        cases = [*_attention_cases(POLICIES[name]), _own_layer_case(POLICIES[name])]
    for case in cases:
        for is_set in (True, False):
            if is_set or not case[1]:  # gradients of Flax layers need a mesh that is set
                with jax.set_mesh(_explicit_mesh()) if is_set else contextlib.nullcontext():
                    _assert_same(case, case[0], _spread(case))


def check_types_on_explicit_axes() -> None:
    """Checks, without running, that attention takes Explicit axes and models refuse them."""
    policy = POLICIES["paper"]
    dense, lists, token = _list_cases()
    for case in (dense, lists):
        jax.make_jaxpr(_with_gradient(case[0]))(*_spread(case))
    jax.eval_shape(token[0], *_spread(token))
    with jax.set_mesh(_explicit_mesh()):
        own = _own_layer_case(policy)
        jax.eval_shape(own[0], *_spread(own))
        function, _, (state, x) = _shared_walk_case()
        spread = NamedSharding(_explicit_mesh(), PartitionSpec("data"))
        jax.eval_shape(function, state, jax.device_put(x, spread))
    forward, steps, _ = _model_cases(policy)
    weights, tokens = forward[2]
    for run in (forward[0], steps[0]):
        with pytest.raises(ValueError, match=r"params .* got Explicit axes .*place a model on it"):
            run(jax.device_put(weights, spread.update(spec=PartitionSpec())), tokens)
        with pytest.raises(ValueError, match=r"tokens .* got Explicit axes \('data',\): make"):
            with jax.set_mesh(_explicit_mesh()):
                run(weights, jax.device_put(tokens, spread))
    with pytest.raises(ValueError, match="query and key must lie on a mesh with axes of type Auto"):
        block_mass(*_spread(dense)[:2], block_size=16)


def check_types_of_policies(names: list[str]) -> None:
    """Checks, without running, that policies work in a `shard_map` and on Explicit axes."""
    for name in names or POLICIES:
        for case in _attention_cases(POLICIES[name]):
            jax.eval_shape(_inside(case), *case[2])
            jax.eval_shape(case[0], *_spread(case))


# Several processes.


def run_process(directory: str, address: str, rank: int) -> None:
    """Runs one of two processes with four devices each; prints the tokens that both generate."""
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    assert len(jax.local_devices()) == 4 and len(jax.devices()) == 8
    config = ModelConfig.from_pretrained(directory)
    where = placement(config, data=2, tensor=4)
    weights, _ = load(directory, sharding=where)
    assert all(len(x.addressable_shards) == 4 for x in jax.tree.leaves(weights))
    tokens, lengths = prompts(*_LENGTHS)
    call: dict[str, Any] = {"model_config": config, "policy": POLICIES["paper"], "lengths": lengths}
    out = sw.generate(weights, tokens, **call, max_new_tokens=8, max_tokens=128)
    print(np.asarray(out.tokens).tolist(), flush=True)
    jax.distributed.shutdown()


def main() -> None:
    """Runs the checks that standard input names, until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # checks may print, too
    for line in sys.stdin:
        failure = None
        try:
            eval(json.loads(line))  # written by the tests
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps(failure), file=answers, flush=True)
        # Compiled programs hold memory maps; a process can have 65,530.
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
