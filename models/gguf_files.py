"""Reads and dequantises the tensors of a GGUF file lazily.

This is the counterpart of `tensor_files.py` for files of llama.cpp: the header lists the tensors,
and each part of a tensor is dequantised on request. A stack of experts' matrices is listed as one
tensor for each expert, such as `blk.0.ffn_up_exps.weight[3]`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from sketchwalk_jax.models.family import MAX_EXPERTS
from sketchwalk_jax.models.gguf_header import ROPE_FREQS, GgufHeader, GgufTensor, import_gguf

LAYER = "blk.{layer}."
KEYS: dict[tuple[str, ...], str] = {
    ("embed", "embedding"): "token_embd.weight",
    ("layers", "attn_norm", "scale"): LAYER + "attn_norm.weight",
    ("layers", "query", "kernel"): LAYER + "attn_q.weight",
    ("layers", "query", "bias"): LAYER + "attn_q.bias",
    ("layers", "key", "kernel"): LAYER + "attn_k.weight",
    ("layers", "key", "bias"): LAYER + "attn_k.bias",
    ("layers", "value", "kernel"): LAYER + "attn_v.weight",
    ("layers", "value", "bias"): LAYER + "attn_v.bias",
    ("layers", "out", "kernel"): LAYER + "attn_output.weight",
    ("layers", "out", "bias"): LAYER + "attn_output.bias",
    ("layers", "query_norm", "scale"): LAYER + "attn_q_norm.weight",
    ("layers", "key_norm", "scale"): LAYER + "attn_k_norm.weight",
    ("layers", "mlp_norm", "scale"): LAYER + "ffn_norm.weight",
    ("layers", "gate", "kernel"): LAYER + "ffn_gate.weight",
    ("layers", "gate", "bias"): LAYER + "ffn_gate.bias",
    ("layers", "up", "kernel"): LAYER + "ffn_up.weight",
    ("layers", "up", "bias"): LAYER + "ffn_up.bias",
    ("layers", "down", "kernel"): LAYER + "ffn_down.weight",
    ("layers", "down", "bias"): LAYER + "ffn_down.bias",
    ("layers", "router", "kernel"): LAYER + "ffn_gate_inp.weight",
    ("layers", "expert_gate", "kernel"): LAYER + "ffn_gate_exps.weight[{expert}]",
    ("layers", "expert_up", "kernel"): LAYER + "ffn_up_exps.weight[{expert}]",
    ("layers", "expert_down", "kernel"): LAYER + "ffn_down_exps.weight[{expert}]",
    ("final_norm", "scale"): "output_norm.weight",
    ("lm_head", "kernel"): "output.weight",
}
"""Name of each parameter in a GGUF file, the same for all families."""

IGNORED = frozenset({ROPE_FREQS})
"""Tensors that are not parameters: the config has their contents."""

_PERMUTED = (".attn_q.weight", ".attn_q.bias", ".attn_k.weight", ".attn_k.bias")


def split_experts(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Replaces each tensor of three axes by the matrices of its experts.

    Blocks of quantised weights lie along the last axis, so an expert is a range of bytes.

    Args:
      tensors: Description of each tensor by its name.

    Returns:
      The same with `NAME[0]`, `NAME[1]`, ... for a stack called `NAME`.

    Example:
      >>> stack = GgufTensor(shape=(2, 4, 8), dtype="F16", start=64, num_bytes=128)
      >>> split_experts({"up": stack})["up[1]"]
      GgufTensor(shape=(4, 8), dtype='F16', start=128, num_bytes=64)
    """
    found = {}
    for name, tensor in tensors.items():
        count = tensor.shape[0] if len(tensor.shape) == 3 else 0
        if not 0 < count <= MAX_EXPERTS:
            found[name] = tensor
            continue
        size = tensor.num_bytes // count
        found |= {
            f"{name}[{expert}]": dataclasses.replace(
                tensor,
                shape=tensor.shape[1:],
                start=tensor.start + expert * size,
                num_bytes=size,
            )
            for expert in range(count)
        }
    return found


class GgufFiles(contextlib.AbstractContextManager["GgufFiles"]):
    """All tensors of a GGUF file by name, the counterpart of `TensorFiles`.

    Attributes:
      source: The file.
      described_by: Name of the metadata that describes the model, for errors.
      headers: Header of each tensor by name; types are ggml's, such as "Q4_K".
      notes: Empty: one file holds all tensors.
      readable: Types in the file that can be read.
      readable_types: All readable types in words, for errors.
    """

    described_by = "metadata"
    readable_types = "a type that the package gguf dequantises"

    def __init__(self, header: GgufHeader, *, head_dim: int) -> None:
        """Maps the file into memory.

        Args:
          header: The file's header.
          head_dim: Width of one head of the model.

        Raises:
          ImportError: If the package `gguf` is missing.
        """
        self._gguf = import_gguf()
        self.source = header.path
        self.headers, self._head_dim = split_experts(header.tensors), head_dim
        # Only Llama's q and k are stored with the channels of a RoPE pair adjacent.
        self._is_permuted = header.metadata["general.architecture"] == "llama"
        self.notes: dict[str, str] = {}
        found = sorted({tensor.dtype for tensor in header.tensors.values()})
        self.readable = tuple(dtype for dtype in found if self._can_read(dtype))
        self._content = np.memmap(header.path, np.uint8, "r")

    def _can_read(self, dtype: str) -> bool:
        """Tests on one block of zeros whether the package can dequantise a type."""
        type_id = self._gguf.GGMLQuantizationType[dtype]
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[type_id]
        try:
            self._gguf.dequantize(np.zeros((1, block_bytes), np.uint8), type_id)
        except NotImplementedError:
            return False
        return True

    def read(self, name: str, *bounds: slice) -> np.ndarray:
        """Reads and dequantises a part of a tensor.

        Whole rows are dequantised, because a part need not end at a quantisation block.

        Args:
          name: Name of the tensor.
          *bounds: A slice with start and stop for each axis, one or two.

        Returns:
          The part in float32.
        """
        tensor = self.headers[name]
        content = self._content[tensor.start : tensor.start + tensor.num_bytes]
        rows = content.reshape(math.prod(tensor.shape[:-1]), -1)
        first = self._stored(name, bounds[0])
        type_id = self._gguf.GGMLQuantizationType[tensor.dtype]
        if len(bounds) == 1:
            return self._gguf.dequantize(np.asarray(rows), type_id)[0][first]
        return self._gguf.dequantize(np.asarray(rows[first]), type_id)[:, bounds[1]]

    def _stored(self, name: str, rows: slice) -> slice | np.ndarray:
        """Returns the file's indices of rows of a tensor.

        Row `i + j H / 2` of a head, the channel that RoPE rotates as part `j` of pair `i`, is
        stored as row `2 i + j` if the channels of a pair are adjacent.
        """
        if not self._is_permuted or not name.endswith(_PERMUTED):
            return rows
        index = np.arange(rows.start, rows.stop)
        part, pair = np.divmod(index % self._head_dim, self._head_dim // 2)
        return index - index % self._head_dim + 2 * pair + part

    def __exit__(self, *exception: object) -> None:
        """Closes the file."""
        del self._content
