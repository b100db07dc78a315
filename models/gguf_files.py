"""The tensors of a GGUF file, read and dequantised lazily.

The counterpart of `tensor_files.py` for a file that llama.cpp reads: the header says what there is,
and a part of a tensor is dequantised when it is asked for.
"""

import contextlib
import math

import numpy as np

from sketchwalk_jax.models.gguf_header import ROPE_FREQS, GgufHeader, import_gguf
from sketchwalk_jax.models.tensor_files import TensorHeader

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
    ("final_norm", "scale"): "output_norm.weight",
    ("lm_head", "kernel"): "output.weight",
}
"""Name of each parameter in a GGUF file, the same for all families."""

IGNORED = frozenset({ROPE_FREQS})
"""Tensors that are no parameters: the config has what they say."""

_PERMUTED = (".attn_q.weight", ".attn_q.bias", ".attn_k.weight", ".attn_k.bias")


class GgufFiles(contextlib.AbstractContextManager):
    """All tensors of a GGUF file by name, as `TensorFiles` has those of a directory.

    Attributes:
      source: The file.
      described_by: Where the file says what model it is, for errors.
      headers: What is known about each tensor, by name; types are ggml's, such as "Q4_K".
      notes: Empty: one file holds all tensors.
      readable: Those of the file's types that can be read.
      readable_types: The same in words, for errors.

    Example:
      >>> header = read_header("Llama-3.2-1B-Q8_0.gguf")  # doctest: +SKIP
      >>> with GgufFiles(header, head_dim=64) as files:  # doctest: +SKIP
      ...     files.headers["output_norm.weight"].shape
      (2048,)
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
        self._tensors, self._head_dim = header.tensors, head_dim
        # Llama's alone are stored for a rotation of channels that stand side by side.
        self._is_permuted = header.metadata["general.architecture"] == "llama"
        self.headers = {
            name: TensorHeader(file=header.path.name, shape=tensor.shape, dtype=tensor.dtype)
            for name, tensor in header.tensors.items()
        }
        self.notes: dict[str, str] = {}
        found = sorted({tensor.dtype for tensor in header.tensors.values()})
        self.readable = tuple(dtype for dtype in found if self._can_read(dtype))
        self._content = np.memmap(header.path, np.uint8, "r")

    def _can_read(self, dtype: str) -> bool:
        """Whether the package dequantises a type: it is asked to, with one block of zeros."""
        type_id = self._gguf.GGMLQuantizationType[dtype]
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[type_id]
        try:
            self._gguf.dequantize(np.zeros((1, block_bytes), np.uint8), type_id)
        except NotImplementedError:
            return False
        return True

    def read(self, name: str, *bounds: slice) -> np.ndarray:
        """Reads and dequantises a part of a tensor.

        Whole rows are dequantised, because their blocks do not end where a part does.

        Args:
          name: Name of the tensor.
          *bounds: A slice with start and stop for each axis, one or two.

        Returns:
          That part, float32.
        """
        tensor = self._tensors[name]
        content = self._content[tensor.start : tensor.start + tensor.num_bytes]
        rows = content.reshape(math.prod(tensor.shape[:-1]), -1)
        first = self._stored(name, bounds[0])
        type_id = self._gguf.GGMLQuantizationType[tensor.dtype]
        if len(bounds) == 1:
            return self._gguf.dequantize(np.asarray(rows), type_id)[0][first]
        return self._gguf.dequantize(np.asarray(rows[first]), type_id)[:, bounds[1]]

    def _stored(self, name: str, rows: slice) -> slice | np.ndarray:
        """Where the file has rows of a tensor.

        Row `i + j H / 2` of a head, the channel that is rotated as part `j` of pair `i`, is stored
        as row `2 i + j` where pairs stand side by side.
        """
        if not self._is_permuted or not name.endswith(_PERMUTED):
            return rows
        index = np.arange(rows.start, rows.stop)
        part, pair = np.divmod(index % self._head_dim, self._head_dim // 2)
        return index - index % self._head_dim + 2 * pair + part

    def __enter__(self) -> "GgufFiles":
        """Returns the open file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Lets go of the file."""
        del self._content
