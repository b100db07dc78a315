"""Steps of real models, compiled for Hopper, copy no weights, no cache and no statistics.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

from pathlib import Path

import hopper
import pytest

pytestmark = pytest.mark.slow

FILE = Path(__file__).parent / "model_cases.py"
DECODING = (
    "decode_llama_8b",
    "decode_llama_8b_dense",
    "decode_llama_8b_of_8",
    "decode_llama_8b_paper",
    "decode_llama_1b",
    "decode_qwen_7b",
    "decode_qwen_7b_dense",
)
READING = ("read_llama_8b", "read_llama_8b_dense")
A_FEW_ROWS = 6 * 2**20  # the logits of eight sequences and their sums
IN_PLACE = ("dynamic_update_slice", "scatter")


def written(found: dict, *, limit: int) -> list[str]:
    """Instructions that write more than so many bytes, but those that replace a few in place."""
    return [
        line
        for size, line in found["writes"]
        if size > limit and not any(word in line.split("=")[0] for word in IN_PLACE)
    ]


@pytest.mark.parametrize("name", DECODING)
def test_a_decoded_token_copies_nothing(name, compiler):
    found = compiler.compile(f"program {FILE}:{name}")
    assert written(found, limit=A_FEW_ROWS) == []
    assert found["temporary_bytes"] < 16 * 2**20


@pytest.mark.parametrize("name", READING)
def test_a_piece_of_a_prompt_copies_no_cache(name, compiler):
    found = compiler.compile(f"program {FILE}:{name}")
    # Activations of 32,768 tokens, the widest those of the mlp; the cache has eight times as much.
    assert written(found, limit=2**30) == []
    assert found["temporary_bytes"] < 3 * 2**30


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
