"""Steps of real models, compiled for Hopper, copy no weights, no cache and no statistics.

A layer of a decoded token launches little besides its kernels, each of which takes a microsecond to
start.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

import re
from pathlib import Path

import hopper
import pytest
from variants import slow_unless

FILE = Path(__file__).parent / "model_cases.py"
# Each with the most that one of its layers may launch.
DECODING = {
    "decode_llama_8b": 16,
    "decode_llama_8b_dense": 17,
    "decode_llama_8b_of_8": 17,
    "decode_llama_8b_paper": 32,
    "decode_llama_1b": 16,
    "decode_qwen_7b": 16,
    "decode_qwen_7b_dense": 17,
}
READING = ("read_llama_8b", "read_llama_8b_dense")
# Activations of 32,768 tokens, the widest those of the mlp: 0.94e9. The head has 1.05e9, the cache
# eight times as many.
ACTIVATIONS = 10**9
A_FEW_ROWS = 6 * 2**20  # the logits of eight sequences and their sums
_WIDE_WEIGHT = re.compile(r"= \(?(?:bf16|f32)\[(?:1,)?(?:4096|14336|1024),(?:4096|14336)\]")
IN_PLACE = ("dynamic_update_slice", "scatter")


def written(found: dict, *, limit: int) -> list[str]:
    """Instructions that write more than so many bytes, but those that replace a few in place."""
    return [
        line
        for size, line in found["writes"]
        if size > limit and not any(word in line.split("=")[0] for word in IN_PLACE)
    ]


KEPT = ("decode_llama_1b", "decode_llama_8b_paper", "read_llama_8b")  # on every change


@pytest.mark.hopper
@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, DECODING))
def test_a_decoded_token_copies_nothing(name, compiler):
    found = compiler.compile(f"program {FILE}:{name}")
    assert written(found, limit=A_FEW_ROWS) == []
    assert found["temporary_bytes"] < 16 * 2**20
    assert found["launches"][0] <= DECODING[name]


@pytest.mark.hopper
@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, READING))
def test_a_piece_of_a_prompt_copies_neither_cache_nor_head(name, compiler):
    found = compiler.compile(f"program {FILE}:{name}")
    assert written(found, limit=ACTIVATIONS) == []
    assert found["temporary_bytes"] < 3 * 2**30


@pytest.mark.hopper
@pytest.mark.slow
def test_two_gpus_share_a_piece_of_a_prompt(compiler):
    found = compiler.compile(f"program {FILE}:read_llama_8b_on_2")
    assert written(found, limit=2**29) == []
    # 513 rows, as the first may begin inside a block, scored by eight heads each, 520 with those
    # that fill the last program, or some of them at a time; then what 128 early rows have beyond
    # that, in three parts of 32 queries.
    reduced = [size for kind, size in found["sends"] if kind == "all-reduce"]
    gathered = [size for kind, size in found["sends"] if kind != "all-reduce"]
    assert reduced == [513 * 64 * 4096 * 2] * 3  # hidden states: of a layer twice, and embeddings
    of_a_row = 8192 * 8 * 4
    assert len(gathered) == 3 and gathered[0] <= 520 * of_a_row
    assert gathered[1] <= 128 * 3 * of_a_row and gathered[2] == 128256 * 2  # the logits


@pytest.mark.hopper
@pytest.mark.slow
def test_two_gpus_share_the_rows_of_a_piece(compiler):
    found = compiler.compile(f"program {FILE}:read_llama_8b_by_rows")
    assert written(found, limit=2**29) == []
    # Rows in four pieces, 516 in all; keys and values of these, and of the cache.
    reduced = [size for kind, size in found["sends"] if kind == "all-reduce"]
    gathered = [size for kind, size in found["sends"] if kind != "all-reduce"]
    of_a_token = 8 * 128 * 2
    assert max(reduced) <= 4096 * 2  # one hidden state
    assert sorted(gathered) == [516 * 64 * of_a_token] * 2 + [131072 * of_a_token] * 2
    # What the cache holds, the most of it, travels while products or kernels run.
    behind = [count for size, count in found["overlaps"] if size == 131072 * of_a_token]
    assert len(behind) == 2 and min(behind) > 0


@pytest.mark.hopper
@pytest.mark.slow
def test_a_prompt_travels_while_its_rows_are_computed(compiler):
    found = compiler.compile(f"program {FILE}:read_llama_8b_by_rows_at_once")
    assert written(found, limit=2**31) == []
    # Keys while queries are projected, values while those that represent rows are chosen.
    (keys, during_keys), (values, during_values) = found["overlaps"]
    assert keys == values == 131072 * 8 * 128 * 2
    assert during_keys > 0 and during_values > 1


@pytest.mark.hopper
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launches"), [("decode_llama_8b_on_2", 23), ("decode_llama_8b_by_blocks", 34)]
)
def test_two_gpus_decode_a_token(name, launches, compiler):
    found = compiler.compile(f"program {FILE}:{name}")
    assert written(found, limit=A_FEW_ROWS) == []
    assert found["temporary_bytes"] < 2**20
    assert found["launches"][0] <= launches
    assert max(size for _, size in found["sends"]) < 2**20  # logits, and shares


_LAYER_PRODUCTS = 7  # query, key, value, out, gate, up, down


@pytest.mark.hopper
def test_a_prompt_is_multiplied_in_eight_bits(compiler):
    found = compiler.compile(f"program {FILE}:read_llama_8b_float8")
    eight = [one for one in found["products"] if set(one) == {"f8e4m3fn"}]
    assert len(eight) % _LAYER_PRODUCTS == 0 and len(eight) >= _LAYER_PRODUCTS
    assert [line for _, line in found["writes"] if _WIDE_WEIGHT.search(line)] == []
    assert written(found, limit=ACTIVATIONS) == []


@pytest.mark.hopper
@pytest.mark.slow
def test_products_that_fall_back_would_be_seen(compiler):
    found = compiler.compile(f"program {FILE}:read_llama_8b_int8")
    assert not any(set(one) == {"f8e4m3fn"} for one in found["products"])


def test_a_dequantised_weight_would_be_seen():
    line = "%convert.1 = bf16[14336,4096]{1,0} fusion(%x)"
    assert _WIDE_WEIGHT.search(line) and not _WIDE_WEIGHT.search(line.replace("bf16", "f8e4m3fn"))
    text = """\
%body (x: f8e4m3fn[8,8]) -> bf16[8,8] {
  %x = f8e4m3fn[8,8]{1,0} parameter(0)
  %wide = bf16[8,8]{1,0} convert(%x)
  %one = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  ROOT %two = bf16[8,8]{1,0} dot(%one, %wide), lhs_contracting_dims={1}
}
"""
    assert hopper.read_products(text) == [("f8e4m3fn", "f8e4m3fn"), ("bf16", "bf16")]


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
