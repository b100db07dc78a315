"""From Hugging Face tensors to stacked parameters: which, checked, and read in parts.

A linear weight is stored as (outputs, inputs), with heads flattened; here it is
``[L, inputs..., outputs...]`` with a head axis. No permutation of q and k is needed: Hugging Face
weights are half-split already.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from sketchwalk_jax.models import llama, qwen
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import flatten_params, input_axes, param_shapes
from sketchwalk_jax.models.tensor_files import FLOAT_DTYPES, TensorFiles

KEYS: dict[str, Mapping[tuple[str, ...], str]] = {
    "llama": llama.KEYS,
    "qwen2": qwen.KEYS,
    "qwen3": qwen.KEYS,
}
EMBEDDING, LM_HEAD = ("embed", "embedding"), ("lm_head", "kernel")
ROWS_PER_READ = 32
"""Stored rows that are read and transposed at a time, so that they stay in the CPU's cache."""
LISTED = 20
"""How many names one line of an error lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSource:
    """Where one stacked parameter comes from.

    Attributes:
        names: Tensor names: one for each layer, or one.
        outputs: Sizes of the output axes, flattened into the rows of a stored tensor.
        inputs: Sizes of the input axes, flattened into its columns; empty for vectors.
        is_transposed: Whether the parameter has its inputs first, as kernels do.
        is_stacked: Whether the parameter has a leading layer axis.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    is_transposed: bool
    is_stacked: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each stored tensor."""
        rows = (math.prod(self.outputs),)
        return (*rows, math.prod(self.inputs)) if self.inputs else rows


def find_sources(
    model_config: ModelConfig, *, embedding: str | None = None
) -> dict[tuple[str, ...], LeafSource]:
    """Names the stored tensors of every parameter.

    Args:
        model_config: The model.
        embedding: Name of the tensor to take as embedding, where it is not the usual one.

    Returns:
        The source of each parameter, by its path.

    Example:
        >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
        ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
        ...                      max_position_embeddings=512)
        >>> source = find_sources(config)[("layers", "key", "kernel")]
        >>> source.names[1], source.stored_shape
        ('model.layers.1.self_attn.k_proj.weight', (16, 32))
    """
    sources = {}
    for path, leaf in flatten_params(param_shapes(model_config)).items():
        is_stacked = path[0] == "layers"
        shape = leaf.shape[1:] if is_stacked else leaf.shape
        if path == EMBEDDING:
            outputs, inputs = shape[:1], shape[1:]
        elif path[-1] == "kernel":
            inputs = input_axes(path, leaf.shape)
            outputs = shape[len(inputs) :]
        else:
            outputs, inputs = shape, ()
        template = KEYS[model_config.model_type][path]
        if path == EMBEDDING and embedding is not None:
            template = embedding
        layers = range(model_config.num_layers if is_stacked else 1)
        sources[path] = LeafSource(
            names=tuple(template.format(layer=layer) for layer in layers),
            outputs=outputs,
            inputs=inputs,
            is_transposed=path[-1] == "kernel",
            is_stacked=is_stacked,
        )
    return sources


def check_sources(
    files: TensorFiles, sources: Mapping[tuple[str, ...], LeafSource], *, ignored: frozenset[str]
) -> None:
    """Compares the headers of the files with what the model needs.

    Args:
        files: The open files.
        sources: What the model needs, from `find_sources`.
        ignored: Tensors that may be there without being needed.

    Raises:
        ValueError: If tensors are missing, unknown, of another shape or not floating point; all
            of them in one message.
    """
    expected = {name: leaf.stored_shape for leaf in sources.values() for name in leaf.names}
    headers = files.headers
    problems = {
        "missing": [name for name in expected if name not in headers],
        # Old files carry the rotary frequencies, which the config determines.
        "unknown": [
            name
            for name in headers
            if name not in expected | dict.fromkeys(ignored)
            and not name.endswith("rotary_emb.inv_freq")
        ],
        "of a wrong shape": [
            f"{name} must be {shape}, got {headers[name].shape}"
            for name, shape in expected.items()
            if name in headers and headers[name].shape != shape
        ],
        "of an unsupported dtype": [
            f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {headers[name].dtype}"
            for name in expected
            if name in headers and headers[name].dtype not in FLOAT_DTYPES
        ],
    }
    if any(problems.values()):
        lines = [
            f"{len(found)} tensors {problem}: {'; '.join(sorted(found)[:LISTED])}"
            + (f"; and {len(found) - LISTED} more" if len(found) > LISTED else "")
            for problem, found in problems.items()
            if found
        ]
        raise ValueError(
            f"the weights in {files.directory} must fit its config.json:\n  " + "\n  ".join(lines)
        )


def read_shard(
    files: TensorFiles,
    source: LeafSource,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
    *,
    advance: Callable[[int], object],
) -> np.ndarray:
    """Reads one device's part of a stacked parameter.

    Args:
        files: The open files.
        source: Where the parameter comes from.
        shape: The whole stacked shape.
        index: The part, a slice for each axis.
        dtype: Dtype of the result.
        advance: Called with the number of bytes each time a tensor is done.

    Returns:
        The part, of `dtype`.
    """
    bounds = [slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
    part = np.empty([bound.stop - bound.start for bound in bounds], dtype)
    if not source.is_stacked:
        _read_tensor(files, source, source.names[0], bounds, part)
        advance(part.nbytes)
        return part
    for target, name in zip(part, source.names[bounds[0]], strict=True):
        _read_tensor(files, source, name, bounds[1:], target)
        advance(target.nbytes)
    return part


def _read_tensor(
    files: TensorFiles, source: LeafSource, name: str, bounds: list[slice], target: np.ndarray
) -> None:
    num_inputs = len(source.inputs)
    if source.is_transposed:
        inputs, outputs = bounds[:num_inputs], bounds[num_inputs:]
        # The inputs of `target` come first; view it in the order of the file.
        axes = (*range(num_inputs, target.ndim), *range(num_inputs))
        target = target.transpose(axes)
    else:
        inputs, outputs = bounds[len(source.outputs) :], bounds[: len(source.outputs)]

    row, column = math.prod(source.outputs[1:]), math.prod(source.inputs[1:])
    columns = [slice(inputs[0].start * column, inputs[0].stop * column)] if inputs else []
    # Only the leading axes are cut in the file; inner ones, rarely sharded, after reading.
    inner = (slice(None), *outputs[1:], *([slice(None)] if inputs else []), *inputs[1:])
    step = max(1, ROWS_PER_READ // row)
    for start in range(outputs[0].start, outputs[0].stop, step):
        stop = min(start + step, outputs[0].stop)
        block = files.read(name, slice(start * row, stop * row), *columns)
        block = block.reshape(stop - start, *source.outputs[1:], *_sizes(inputs, source.inputs))
        offset = outputs[0].start
        target[start - offset : stop - offset] = block[inner]


def _sizes(inputs: list[slice], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (inputs[0].stop - inputs[0].start, *sizes[1:]) if inputs else ()


def resolve_tying(
    files: TensorFiles, model_config: ModelConfig
) -> tuple[bool, str | None, frozenset[str]]:
    """Decides what a tied checkpoint's embedding and lm_head are, as transformers does.

    A tied file may hold either or both. Where both are there and differ, the config is wrong.

    Args:
        files: The open files.
        model_config: The model as its config describes it.

    Returns:
        Whether the head is tied, the tensor that is the embedding (None for the usual one), and
        the tensors to ignore.
    """
    keys = KEYS[model_config.model_type]
    embedding, head = keys[EMBEDDING], keys[LM_HEAD]
    if not model_config.tie_word_embeddings or head not in files.headers:
        return model_config.tie_word_embeddings, None, frozenset()
    if embedding not in files.headers:
        return True, head, frozenset()
    expected = (model_config.vocab_size, model_config.hidden_size)
    shapes = {files.headers[name].shape for name in (embedding, head)}
    if shapes == {expected} and not _are_equal(files, embedding, head, num_rows=expected[0]):
        return False, None, frozenset()
    return True, None, frozenset({head})


def _are_equal(files: TensorFiles, first: str, second: str, *, num_rows: int) -> bool:
    for start in range(0, num_rows, ROWS_PER_READ):
        rows = slice(start, min(start + ROWS_PER_READ, num_rows)), slice(None)
        if not np.array_equal(files.read(first, *rows), files.read(second, *rows)):
            return False
    return True
