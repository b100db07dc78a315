"""Steps of real models, compiled for GPUs, copy no weights, cache or statistics.

In decode, a layer launches little besides its kernels: each launch takes a microsecond.
"""

import re
from pathlib import Path

import hopper
import pytest
from compiling import compile_for
from variants import slow_unless, weekly

FILE = Path(__file__).parents[1] / "model_cases.py"
# Limits of launches per layer. In caches as long as these, one launch adds up heads for the lists.
DECODING = {
    "decode_llama_8b": 21,
    "decode_llama_8b_long": 21,
    "decode_llama_8b_float8": 17,
    "decode_llama_8b_dense": 20,
    "decode_llama_8b_of_8": 23,
    "decode_llama_8b_paper": 36,
    "decode_llama_1b": 20,
    "decode_qwen_7b": 20,
    "decode_qwen_7b_dense": 19,
    "decode_qwen_30b": 23,
    "decode_qwen_30b_float8": 24,
    "decode_qwen_30b_of_8": 24,
    "decode_llama_1b_on_ampere": 20,
    "decode_llama_1b_on_ampere_dense": 20,
    "decode_llama_8b_on_2": 27,
    "decode_llama_8b_by_blocks": 38,
    "decode_llama_1b_on_turing_dense": None,  # a T4, where XLA reads weights and caches in place
}
READING = ("read_llama_8b", "read_llama_8b_dense")
# Activations of 32,768 tokens are at most 0.94e9 bytes, in the mlp. The output matrix has 1.05e9,
# the cache eight times as many.
ACTIVATIONS = 10**9
A_FEW_ROWS = 6 * 2**20  # logits of eight sequences and their sums
_WIDE_WEIGHT = re.compile(r"= \(?(?:bf16|f32)\[(?:1,)?(?:4096|14336|1024),(?:4096|14336)\]")
_WIDE_ROWS = re.compile(r"= \(?\w+\[(?:1,)?32832,14336\]")
_EXPERTS = re.compile(r"= \(?\w+\[(?:1,|48,)?128,(?:2048,768|768,2048)\]")
IN_PLACE = ("dynamic_update_slice", "scatter")


def written(found: dict, *, limit: int) -> list[str]:
    """Returns instructions that write more bytes than the limit, except updates in place."""
    return [
        line
        for size, line in found["writes"]
        if size > limit and not any(word in line.split("=")[0] for word in IN_PLACE)
    ]


KEPT = ("decode_llama_1b", "decode_llama_1b_on_ampere", "read_llama_8b")  # on every change
WEEKLY = {f"decode_llama_8b_{x}" for x in ("long", "dense", "paper")} | {
    "decode_llama_1b_on_ampere_dense",
    "decode_qwen_7b_dense",
    "decode_qwen_30b_float8",
    "decode_qwen_30b_of_8",
}


def compile_program(name):
    gpu = "8.6" if "on_ampere" in name else "7.5" if "on_turing" in name else "9.0"
    return compile_for(gpu, f"program {FILE}:{name}")


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name",
    [
        *slow_unless(KEPT.__contains__, (x for x in DECODING if x not in WEEKLY)),
        *weekly(x for x in DECODING if x in WEEKLY),
    ],
)
def test_a_decoded_token_copies_nothing(name):
    found, launches = compile_program(name), DECODING[name]
    has_ranks = name.endswith(("_on_2", "_by_blocks"))
    # Without kernels, the largest array that is written has scores of 32 heads and 16,384 tokens.
    assert written(found, limit=A_FEW_ROWS if launches else 2 * 2**20) == []
    assert found["temporary_bytes"] < (2**21 if has_ranks else 16 * 2**20)
    assert launches is None or found["launches"][0] <= launches
    assert bool(found["sends"]) == has_ranks
    assert all(size < 2**20 for _, size in found["sends"])  # logits and shares


@pytest.mark.hopper
@pytest.mark.slow
def test_greedy_tokens_ask_the_host_after_several():
    """Greedy decoding asks only whether to continue; sampling asks its options for each token."""
    greedy, drawn = (compile_program(f"generate_llama_1b{one}") for one in ("", "_drawn"))
    assert greedy["questions"] == 1 < drawn["questions"]
    for found in (greedy, drawn):
        assert written(found, limit=A_FEW_ROWS) == []


@pytest.mark.hopper
@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, READING))
def test_a_piece_of_a_prompt_copies_neither_cache_nor_head(name):
    found = compile_program(name)
    assert written(found, limit=ACTIVATIONS) == []
    assert found["temporary_bytes"] < 3 * 2**30


@pytest.mark.hopper
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "_float8"])
def test_a_piece_of_a_prompt_copies_no_experts(weights):
    found = compile_program(f"read_qwen_30b{weights}")
    # Rows of 32,832 tokens for 8 experts each, in groups of 128, in two parts.
    rows = 2 * 2048 * 128 * (16416 * 8 // 128 + 128)
    assert written(found, limit=rows) == []
    copies = [line for _, line in found["writes"] if _EXPERTS.search(line)]
    assert len(copies) == (3 if weights else 0)  # dequantised for the kernel, a layer at a time
    assert found["temporary_bytes"] < 3 * 2**30


def sent(found: dict) -> tuple[list[int], list[int]]:
    """Returns the bytes of each sum over ranks, and of each other transfer."""
    reduced = [size for kind, size in found["sends"] if kind == "all-reduce"]
    return reduced, [size for kind, size in found["sends"] if kind != "all-reduce"]


@pytest.mark.hopper
@pytest.mark.slow
def test_two_gpus_share_a_piece_of_a_prompt():
    found = compile_program("read_llama_8b_on_2")
    assert written(found, limit=2**29) == []
    # Page scores of 513 rows, as the first may begin inside a block, and eight heads each; 520 with
    # the padding of the last thread block, or fewer in parts. Then those of 128 early rows, in
    # three parts of 32 queries.
    reduced, gathered = sent(found)
    assert reduced == [513 * 64 * 4096 * 2] * 3  # hidden states: two per layer, and embeddings
    of_a_row = 8192 * 8 * 4
    assert len(gathered) == 3 and gathered[0] <= 520 * of_a_row
    assert gathered[1] <= 128 * 3 * of_a_row and gathered[2] == 128256 * 2  # logits


@pytest.mark.hopper
@pytest.mark.slow
def test_two_gpus_share_the_rows_of_a_piece():
    found = compile_program("read_llama_8b_by_rows")
    assert written(found, limit=2**29) == []
    # Rows in four pieces, 516 in all; their keys and values, and the whole cache's.
    reduced, gathered = sent(found)
    of_a_token = 8 * 128 * 2
    assert max(reduced) <= 4096 * 2  # one hidden state
    assert sorted(gathered) == [516 * 64 * of_a_token] * 2 + [131072 * of_a_token] * 2
    # The cache is the most; its transfer overlaps matmuls or kernels.
    behind = [count for size, count in found["overlaps"] if size == 131072 * of_a_token]
    assert len(behind) == 2 and min(behind) > 0


@pytest.mark.hopper
@pytest.mark.slow
def test_a_prompt_travels_while_its_rows_are_computed():
    found = compile_program("read_llama_8b_by_rows_at_once")
    assert written(found, limit=2**31) == []
    # Keys travel during the query projection, values during the choice of representatives.
    (keys, during_keys), (values, during_values) = found["overlaps"]
    assert keys == values == 131072 * 8 * 128 * 2
    assert during_keys > 0 and during_values > 1


# Shapes of the weights of each matmul in a layer, outputs first.
_PRODUCTS = {
    "query": "[4096,4096]",
    "key": "[1024,4096]",
    "value": "[1024,4096]",
    "out": "[4096,4096]",
    "gate": "[14336,4096]",
    "up": "[14336,4096]",
    "down": "[4096,14336]",
}


def multiplied_wide(found: dict) -> list[str]:
    """Returns weights of a layer that are not always multiplied as float8."""
    operands: dict[str, list[tuple[str, str]]] = {name: [] for name in _PRODUCTS}
    for name, *pair in found["products"]:
        for own in set(name.split("/")) & set(_PRODUCTS):
            operands[own].append(tuple(pair))

    def is_right(name: str, pair: tuple[str, str]) -> bool:
        has_weights = f"f8e4m3fn{_PRODUCTS[name]}" in pair
        return has_weights and all(one.startswith("f8e4m3fn[") for one in pair)

    return [
        name
        for name, pairs in operands.items()
        if not pairs or not all(is_right(name, pair) for pair in pairs)
    ]


def widened(found: dict) -> list[str]:
    """Returns instructions that write weights in more than eight bits."""
    return [line for _, line in found["writes"] if _WIDE_WEIGHT.search(line)]


@pytest.mark.hopper
def test_a_prompt_is_multiplied_in_eight_bits():
    found = compile_program("read_llama_8b_float8")
    assert multiplied_wide(found) == []
    assert widened(found) == []
    assert written(found, limit=ACTIVATIONS) == []
    # One kernel runs between the mlp's matmuls and reads their outputs directly: only matmuls write
    # rows with the mlp's channels.
    assert [x for x in found["writes"] if _WIDE_ROWS.search(x[1]) and "gemm" not in x[1]] == []


@pytest.mark.hopper
@pytest.mark.slow
@pytest.mark.parametrize("how", ["int8", "widened"])
def test_products_that_fall_back_would_be_seen(how):
    found = compile_program(f"read_llama_8b_{how}")
    assert multiplied_wide(found) == list(_PRODUCTS)
    assert how == "int8" or widened(found) != []


def test_one_product_of_wide_weights_would_be_seen():
    of_rows = {name: shape.split(",")[1].rstrip("]") for name, shape in _PRODUCTS.items()}
    products = [
        (f"jit(f)/mlp/{name}/dot", f"f8e4m3fn[64,{of_rows[name]}]", f"f8e4m3fn{shape}")
        for name, shape in _PRODUCTS.items()
    ]
    assert multiplied_wide({"products": products}) == []
    assert multiplied_wide({"products": products[1:]}) == ["query"]
    for bad in ("bf16[4096,14336]", "f8e4m3fn[4096,4096]"):
        spoilt = [*products, (products[-1][0], products[-1][1], bad)]
        assert multiplied_wide({"products": spoilt}) == ["down"]
    wide_rows = [*products, ("jit(f)/up/dot", "bf16[64,4096]", "f8e4m3fn[14336,4096]")]
    assert multiplied_wide({"products": wide_rows}) == ["up"]


def test_a_dequantised_weight_would_be_seen():
    line = "%convert.1 = bf16[14336,4096]{1,0} fusion(%x)"
    assert widened({"writes": [(0, line)]}) == [line]
    assert widened({"writes": [(0, line.replace("bf16", "f8e4m3fn"))]}) == []
    text = """\
%body (x: f8e4m3fn[8,8]) -> bf16[8,8] {
  %x = f8e4m3fn[8,8]{1,0} parameter(0)
  %wide = bf16[8,8]{1,0} convert(%x)
  %one = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(f)/up/dot"}
  ROOT %two = bf16[8,8]{1,0} dot(%one, %wide), lhs_contracting_dims={1}
}
"""
    assert hopper.read_products(text) == [
        ("jit(f)/up/dot", "f8e4m3fn[8,8]", "f8e4m3fn[8,8]"),
        ("", "bf16[8,8]", "bf16[8,8]"),
    ]


def test_a_copy_would_be_seen():
    text = """\
%fused_copy (p: bf16[8,4096,4096]) -> bf16[8,4096,4096] {
  ROOT %copy.2 = bf16[8,4096,4096]{2,1,0} copy(%p)
}

ENTRY %main (x: bf16[8,4096,4096]) -> bf16[8,4096,4096] {
  %x = bf16[8,4096,4096]{2,1,0} parameter(0)
  %loop_dynamic_update_slice_fusion = bf16[8,4096,4096]{2,1,0} fusion(%x), calls=%fused_copy
  %pair = (s32[], f32[4,2]{1,0}) fusion(%x), kind=kLoop, calls=%fused_copy
  ROOT %copy.1 = bf16[8,4096,4096]{2,1,0} copy(%x)
}
"""
    found = {"writes": hopper.read_writes(text)}
    assert [size for size, _ in found["writes"]] == [2**28, 32, 2**28]
    assert [line.split()[1] for line in written(found, limit=2**20)] == ["%copy.1"]


def test_a_launch_would_be_seen():
    text = """\
%fused_add (p: s32[]) -> s32[] {
  ROOT %add.1 = s32[] add(%p, %p)
}

%layers (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %get = s32[] get-tuple-element(%state), index=0
  %moved = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-start(%get), calls=%fused_add
  %kernel = f32[4]{0} custom-call(%get), custom_call_target="mosaic_gpu_v2"
  %next = s32[] fusion(%get), kind=kLoop, calls=%fused_add
  %done = f32[4]{0} fusion-done(%moved)
  ROOT %all = (s32[], f32[4]{0}) tuple(%next, %done)
}

ENTRY %main (x: s32[]) -> (s32[], f32[4]) {
  %x = s32[] parameter(0)
  %copy.2 = s32[] copy(%x)
  ROOT %loop = (s32[], f32[4]{0}) while(%copy.2), condition=%goes_on, body=%layers
}
"""
    assert hopper.read_launches(text) == [3]


def test_a_question_would_be_seen():
    text = """\
  %w = (s32[]) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"4"}}
  %w.1 = (s32[]) while(%t), condition=%c.1, body=%b.1
  %c.2 = (f32[4]{0}) conditional(%p, %t, %t), true_computation=%d, false_computation=%e
  %g = f32[4]{0} get-tuple-element(%conditional.2), index=0
"""
    assert hopper.read_questions(text) == 2


def test_a_wait_would_be_seen():
    text = """\
%layers (x: bf16[4,8]) -> bf16[8,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %all-gather-start = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%x), dimensions={0}
  %wrapped_slice = bf16[4,4]{1,0} fusion(%x), kind=kLoop, calls=%slice
  %all-gather-done = bf16[8,8]{1,0} all-gather-done(%all-gather-start)
  %all-gather-start.1 = ((bf16[4,4]{1,0}), bf16[8,4]{1,0}) all-gather-start(%wrapped_slice)
  %gemm_fusion_dot.1 = bf16[4,4]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2"
  ROOT %all-gather-done.1 = bf16[8,4]{1,0} all-gather-done(%all-gather-start.1)
}
"""
    assert hopper.read_overlaps(text) == [(128, 0), (64, 2)]
