"""Memory of compiled programs at 32K tokens: no tokens × tokens array, no copy of the cache.

Programs are compiled for abstract arguments and never run.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from sketchwalk_jax import (
    BlockSelection,
    Dense,
    KernelConfig,
    SketchWalkConfig,
    block_sparse_attention,
    block_sparse_decode,
    decode_step,
    dense_attention,
    generate,
    init_cache,
    prefill,
)
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import param_shapes
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.selection import block_budget

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="XLA's CPU backend before JAX 0.12 widens whole bfloat16 arrays to float32",
)

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SIZE = 32768, 32, 8, 128, 64
NUM_LAYERS = 4
CONFIGS = {
    "paper": SketchWalkConfig.paper(density=0.1),
    "released": SketchWalkConfig.released(),
    "oracle": OracleConfig(density=0.1),
    "dense": Dense(),
}
MODEL = ModelConfig(
    model_type="llama",
    vocab_size=256,
    num_layers=NUM_LAYERS,
    hidden_size=256,
    intermediate_size=512,
    num_heads=NUM_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=NUM_TOKENS,
    dtype="bfloat16",
)


def abstract(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_program(function, *arguments, donated: tuple[int, ...] = ()):
    return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()


def buffers(compiled) -> Iterator[tuple[str, int]]:
    """Yields dtype and number of elements of all arrays that a program writes to memory.

    Instructions inside fusions do not count: their results stay in registers.
    """
    text = compiled.as_text()
    fused = set(re.findall(r" fusion\(.*?calls=(%[\w.-]+)", text))
    for computation in re.split(r"\n(?=\S)", text):
        name = re.match(r"(?:ENTRY )?(%[\w.-]+) \(", computation)
        if name is not None and name[1] not in fused:
            for dtype, shape in re.findall(r"= \(?([a-z]\w*)\[([\d,]*)\]", computation):
                yield dtype, math.prod(int(axis) for axis in shape.split(",") if axis)


def assert_nothing_quadratic(compiled) -> None:
    shapes = re.findall(r"\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.strip(",").split(","))) for shape in shapes)
    assert largest < NUM_TOKENS**2


def assert_no_float32_keys(compiled) -> None:
    """Keys are bfloat16, so a float32 array as large as one layer's keys is a converted copy."""
    largest = max(size for dtype, size in buffers(compiled) if dtype == "f32")
    assert largest < NUM_TOKENS * NUM_KV_HEADS * HEAD_DIM


QUERY = abstract((1, NUM_TOKENS, NUM_HEADS, HEAD_DIM), "bfloat16")
TOKEN_QUERY = abstract((1, 1, NUM_HEADS, HEAD_DIM), "bfloat16")
KEY = abstract((1, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM), "bfloat16")
STACKED_KEY = abstract((NUM_LAYERS, *KEY.shape), "bfloat16")


def abstract_selection(num_rows: int) -> BlockSelection:
    width = int(block_budget(NUM_TOKENS // SIZE, density=0.1, sink_blocks=1)[-1])
    return BlockSelection(abstract((1, 1, num_rows, width)), abstract((1, 1, num_rows)), SIZE)


@pytest.mark.parametrize("is_stacked", [False, True], ids=["layer", "stacked"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_prefill_attention_holds_the_queries_twice_and_no_more(is_sparse, is_stacked):
    def attend(query, key, value, selection, layer):
        layer = layer if is_stacked else None
        if is_sparse:
            return block_sparse_attention(query, key, value, selection, layer=layer)
        return dense_attention(query, key, value, layer=layer)

    key = STACKED_KEY if is_stacked else KEY
    selection = abstract_selection(NUM_TOKENS // SIZE)
    compiled = compile_program(attend, QUERY, key, key, selection, abstract(()))
    assert_nothing_quadratic(compiled)
    assert_no_float32_keys(compiled)
    # Allow one transposed copy of the queries, but no copy of the keys.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < num_bytes(QUERY) + num_bytes(KEY)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_decode_attention_reads_the_cache_where_it_lies(is_sparse):
    def attend(query, key, value, selection, lengths, layer):
        if is_sparse:
            return block_sparse_decode(
                query, key, value, selection, kv_lengths=lengths, layer=layer
            )
        return dense_attention(query, key, value, query_offset=lengths - 1, layer=layer)

    selection, lengths, layer = abstract_selection(1), abstract((1,)), abstract(())
    compiled = compile_program(
        attend, TOKEN_QUERY, STACKED_KEY, STACKED_KEY, selection, lengths, layer
    )
    assert_nothing_quadratic(compiled)
    assert_no_float32_keys(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < num_bytes(KEY) // 2


def compile_with_cache(function, config, *arguments, capacity: int = NUM_TOKENS):
    """Compiles `function(params, *arguments, cache)`, which may overwrite the cache."""
    batch = arguments[0].shape[0]
    cache = jax.eval_shape(
        functools.partial(init_cache, MODEL, config, batch=batch, max_tokens=capacity)
    )
    arguments = (param_shapes(MODEL), *arguments, cache)
    return compile_program(function, *arguments, donated=(len(arguments) - 1,)), cache


def assert_cache_is_updated_in_place(compiled, cache, *, limit: int) -> None:
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= num_bytes(cache)
    assert analysis.temp_size_in_bytes < limit
    num_layers, batch, num_tokens, *heads = cache.key.shape
    tokens = rf"(?:{num_tokens}|{num_tokens // SIZE},{SIZE})"
    shape = rf"{num_layers},{batch},{tokens},{','.join(map(str, heads))}"
    assert re.search(rf"bf16\[{shape}\]", compiled.as_text())
    assert not re.search(rf"= bf16\[{shape}\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("paper", "both"),
        ("paper", "prefill"),
        pytest.param("released", "both", marks=pytest.mark.slow),
        pytest.param("oracle", "both", marks=pytest.mark.slow),
        ("dense", "both"),
    ],
)
def test_decode_step_copies_no_cache(name, phase):
    config = CONFIGS[name]
    step = functools.partial(decode_step, model_config=MODEL, policy=config, phase=phase)
    compiled, cache = compile_with_cache(step, config, abstract((1,)))
    assert_nothing_quadratic(compiled)
    assert_no_float32_keys(compiled)
    assert_cache_is_updated_in_place(compiled, cache, limit=num_bytes(STACKED_KEY) // 4)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["paper", "dense"])
def test_decode_step_copies_no_cache_that_one_step_reads(name, batch):
    config = CONFIGS[name]
    capacity = 4096
    kernel_config = KernelConfig(dense_decode_keys=capacity)
    step = functools.partial(
        decode_step, model_config=MODEL, policy=config, kernel_config=kernel_config
    )
    compiled, cache = compile_with_cache(step, config, abstract((batch,)), capacity=capacity)
    assert_cache_is_updated_in_place(compiled, cache, limit=num_bytes(cache.key))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prefill_copies_no_cache(name):
    config = CONFIGS[name]
    read = functools.partial(prefill, model_config=MODEL, policy=config, chunk_size=2048)
    compiled, cache = compile_with_cache(read, config, abstract((1, NUM_TOKENS // 2)))
    assert_nothing_quadratic(compiled)
    assert_no_float32_keys(compiled)
    assert_cache_is_updated_in_place(compiled, cache, limit=num_bytes(STACKED_KEY) // 2)


def test_whole_prefill_copies_no_cache():
    config = CONFIGS["paper"]
    read = functools.partial(prefill, model_config=MODEL, policy=config)
    compiled, cache = compile_with_cache(read, config, abstract((1, NUM_TOKENS)))
    assert_nothing_quadratic(compiled)
    # Allow queries and outputs of one layer in two layouts, but no copy of the cache.
    assert_cache_is_updated_in_place(compiled, cache, limit=5 * num_bytes(QUERY))


@pytest.mark.slow
def test_generation_from_a_cache_copies_no_cache():
    config = CONFIGS["paper"]

    def continue_generation(params, tokens, cache):
        return generate(
            params, tokens, cache=cache, model_config=MODEL, policy=config, max_new_tokens=8
        )

    compiled, cache = compile_with_cache(continue_generation, config, abstract((1, SIZE)))
    assert_nothing_quadratic(compiled)
    assert_no_float32_keys(compiled)
    # Density is counted anew, so its few bytes are not reused.
    cache = dataclasses.replace(cache, density=())
    assert_cache_is_updated_in_place(compiled, cache, limit=num_bytes(STACKED_KEY) // 2)


def test_the_checks_see_what_they_look_for():
    query = abstract((NUM_TOKENS, HEAD_DIM), "bfloat16")
    naive = compile_program(lambda q, k: jax.nn.softmax(q @ k.T) @ k, query, query)
    with pytest.raises(AssertionError):
        assert_nothing_quadratic(naive)
    converted = compile_program(lambda key: jnp.sort(key.astype("float32"), axis=0), KEY)
    with pytest.raises(AssertionError):
        assert_no_float32_keys(converted)
    cache = jax.eval_shape(
        functools.partial(init_cache, MODEL, Dense(), batch=1, max_tokens=NUM_TOKENS)
    )
    kept = compile_program(lambda cache: (cache.key, cache), cache, donated=(0,))
    with pytest.raises(AssertionError):
        assert_cache_is_updated_in_place(kept, cache, limit=num_bytes(STACKED_KEY))
