"""Loads checkpoints into the stacked parameter tree.

First the name and shape of every needed tensor are checked against the files' headers; then each
parameter is read straight into its stacked array, in its target dtype, and only the shards of each
device. Beyond loaded parameters, the host never holds more than one stacked parameter.

A linear weight is stored as (outputs, inputs), with heads flattened; here it is
`[L, inputs..., outputs...]` with a head axis. No permutation of q and k is needed: Hugging Face
weights are half-split already.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from sketchwalk_jax.models.checkpoint import load_saved
from sketchwalk_jax.models.checkpoint import save as save
from sketchwalk_jax.models.config import SAVED_CONFIG_FILE, ModelConfig
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.gguf_files import IGNORED, GgufFiles
from sketchwalk_jax.models.gguf_files import KEYS as GGUF_KEYS
from sketchwalk_jax.models.gguf_header import read_header
from sketchwalk_jax.models.hf_config import FAMILIES, checkpoint_dtype
from sketchwalk_jax.models.hub import find_checkpoint
from sketchwalk_jax.models.params import (
    Params,
    ParamsSharding,
    check_weights,
    flatten_params,
    input_axes,
    num_stack_axes,
    own_layers,
    param_shapes,
    shardings_by_path,
    unflatten_params,
)
from sketchwalk_jax.models.plans import find_plan
from sketchwalk_jax.models.plans import fingerprint as fingerprint
from sketchwalk_jax.models.quantized import quantize_rows
from sketchwalk_jax.models.tensor_files import FLOAT_DTYPES, TensorFiles
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.progress import progress_bar
from sketchwalk_jax.validation import DTYPES, check_dtype

Files = TensorFiles | GgufFiles
"""Source of tensors by name; both types read a part of a tensor at a time."""

EMBEDDING, LM_HEAD = ("embed", "embedding"), ("lm_head", "kernel")
PREFIX = "model."
"""Prefix of all names except the head's; base models (`LlamaModel`, `Qwen3Model`) lack it."""
ROWS_PER_READ = 32
"""Stored rows that are read and transposed at a time, so that they stay in the CPU's cache."""
LISTED = 20
"""Most names in one line of an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSource:
    """The source of one stacked parameter.

    Attributes:
      names: Tensor names: one for each layer or, for experts, for each expert of each layer; or a
        single one.
      outputs: Sizes of the output axes, flattened into the rows of a stored tensor.
      inputs: Sizes of the input axes, flattened into its columns; empty for vectors.
      is_transposed: Whether the parameter has its inputs first, as kernels do.
      stack: Sizes of the leading axes, of layers and experts, that number the names.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    is_transposed: bool
    stack: tuple[int, ...]

    def names_of(self, bounds: Sequence[slice]) -> list[str]:
        """Lists the names of the tensors in a part of the stack."""
        names = np.array(self.names, object).reshape(1, *self.stack)
        return list(names[(slice(None), *bounds)].ravel())

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each stored tensor."""
        rows = (math.prod(self.outputs),)
        return (*rows, math.prod(self.inputs)) if self.inputs else rows


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike | None = None,
    weights: str | None = None,
    sharding: ParamsSharding = None,
    progress: bool = True,
    use_plan: bool = True,
    before_reading: Callable[[Params, ModelConfig], object] | None = None,
) -> tuple[Params, ModelConfig]:
    """Loads a checkpoint: a directory, a GGUF file, or a model of the Hugging Face hub by its name.

    Linear weights are transposed and the layers are stacked; see `sketchwalk_jax.models.params` for
    the tree. Names and shapes are compared with the config before any weight is read. Weights of a
    GGUF file are dequantised a few rows at a time, which needs the package `gguf`.

    Args:
      directory: A local directory with `config.json` and safetensors files, single or sharded; or a
        directory written by `save`; or a GGUF file of a supported family; or a name such as
        `"Qwen/Qwen3-0.6B"`. A name is downloaded once through huggingface_hub (configuration,
        tokenizer and safetensors only), unless a directory of that name exists.
      dtype: Dtype of the parameters: float32, float16 or bfloat16. None keeps the dtype of the
        checkpoint: the one that its config declares, or else that of its embedding. For a quantised
        GGUF file, None means bfloat16; float32 holds the values of such a file exactly.
      weights: `"float8"` or `"int8"` quantises the weights of the linear layers to eight bits while
        they are read, with a scale for each output channel (`sketchwalk_jax.models.quantized` has
        the equations). Embedding and output head keep `dtype`. None leaves weights as they are; of
        a directory that `save` wrote with quantised weights, it keeps these.
      sharding: Where the parameters are placed. None uses the default device. A
        `jax.sharding.Sharding` is used for all parameters. It can also be a tree of shardings with
        the layout of the parameters, or a function that returns a sharding, such as
        `sketchwalk_jax.sharding.place(mesh, model_config)`. The function gets a parameter's path (a
        tuple such as `("layers", "query", "kernel")`) and its `jax.ShapeDtypeStruct`. Each process
        reads only what its devices hold.
      progress: Whether to show a progress bar on standard error if loading takes longer than a
        second. If standard error is not a terminal, a line is printed every half minute.
      use_plan: Whether to use the plan that `sketchwalk calibrate` wrote next to the checkpoint, if
        any. A plan of another checkpoint is refused.
      before_reading: Called with the shapes of the parameters and the configuration before the
        weights are read, for example to compile meanwhile; not for a directory of `save`.

    Returns:
      The parameters and the model's configuration. The configuration includes the plan, and its
      `dtype` is that of the parameters.

    Raises:
      FileNotFoundError: If the directory, its config or files of its index are missing, or there is
        no model of that name.
      ConnectionError: If the hub cannot be reached.
      PermissionError: If the model is gated and you have no access.
      ImportError: If the file is GGUF and the package `gguf` is missing.
      ValueError: If `weights` is unknown, or other than a saved directory's; or if a weight that is
        quantised is NaN or infinite; or if the weights are not safetensors or GGUF, a file is
        truncated or corrupt, or tensors are missing, unknown, of another shape or of a type that
        cannot be read (all listed at once); or if the plan is damaged or of another checkpoint.
      NotImplementedError: If the config asks for something that is not implemented.

    Example:
      >>> params, model_config = load("Llama-3.2-1B", dtype="bfloat16")  # doctest: +SKIP
      >>> params["layers"]["query"]["kernel"].shape  # doctest: +SKIP
      (16, 2048, 32, 64)
    """
    target = None if dtype is None else check_dtype("dtype", dtype)
    if weights is not None:
        check_weights(weights)
    directory = find_checkpoint(directory, progress=progress)
    plan = find_plan(directory) if use_plan else None
    if (directory / SAVED_CONFIG_FILE).exists():
        params, model_config = load_saved(
            directory, dtype=target, weights=weights, sharding=sharding
        )
    else:
        find = _find_in_gguf if directory.is_file() else _find_in_directory
        with contextlib.ExitStack() as stack:
            files, sources, model_config = find(directory, stack)
            shapes = param_shapes(model_config, target, weights=weights)
            if before_reading is not None:
                before_reading(shapes, _complete(model_config, plan, shapes))
            params = _read_params(files, sources, shapes, sharding, progress=progress)
    return params, _complete(model_config, plan, params)


def _complete(model_config: ModelConfig, plan: Plan | None, params: Params) -> ModelConfig:
    """Adds the plan, and the dtype of the parameters, which is the default of `init_cache`."""
    loaded = params["embed"]["embedding"].dtype.name
    return dataclasses.replace(model_config, plan=plan, dtype=loaded)


def _find_in_directory(
    directory: Path, stack: contextlib.ExitStack
) -> tuple[Files, dict[tuple[str, ...], LeafSource], ModelConfig]:
    """Opens the files of a directory until `stack` closes them, and checks their headers."""
    model_config = ModelConfig.from_pretrained(directory)
    files = stack.enter_context(TensorFiles(directory))
    keys = FAMILIES[model_config.model_type].keys
    bare = {path: name.removeprefix(PREFIX) for path, name in keys.items()}
    is_base = keys[EMBEDDING] not in files.headers and bare[EMBEDDING] in files.headers
    keys = bare if is_base else keys
    is_tied, embedding, ignored = resolve_tying(files, model_config, keys=keys)
    if is_tied != model_config.tie_word_embeddings:
        warnings.warn(
            f"{directory} declares tied embeddings but holds a different lm_head.weight; the "
            f"lm_head is used. Set tie_word_embeddings to false in config.json",
            stacklevel=3,
        )
        model_config = dataclasses.replace(model_config, tie_word_embeddings=is_tied)
    sources = find_sources(model_config, keys={**keys, EMBEDDING: embedding})
    check_headers(files, sources, ignored=ignored)
    if is_base and is_tied and keys[LM_HEAD] not in files.headers:
        warnings.warn(
            f"{directory} holds a base model without a head: its embedding is the head, as "
            f"tie_word_embeddings says. Of an embedding model, logits and texts mean nothing",
            stacklevel=3,
        )
    if checkpoint_dtype(read_json(directory / "config.json")) is None:
        stored = FLOAT_DTYPES[files.headers[embedding].dtype]
        stored = stored if stored in DTYPES else "float32"
        model_config = dataclasses.replace(model_config, dtype=stored)
    return files, sources, model_config


def _find_in_gguf(
    path: Path, stack: contextlib.ExitStack
) -> tuple[Files, dict[tuple[str, ...], LeafSource], ModelConfig]:
    """Does for a GGUF file what `_find_in_directory` does for a directory."""
    header, model_config = read_header(path), ModelConfig.from_pretrained(path)
    files = stack.enter_context(GgufFiles(header, head_dim=model_config.head_dim))
    sources = find_sources(model_config, keys=GGUF_KEYS)
    check_headers(files, sources, ignored=IGNORED)
    return files, sources, model_config


def _read_params(
    files: Files,
    sources: Mapping[tuple[str, ...], LeafSource],
    shapes: Params,
    sharding: ParamsSharding,
    *,
    progress: bool,
) -> Params:
    leaves, shardings = flatten_params(shapes), shardings_by_path(sharding, shapes)
    params: dict[tuple[str, ...], jax.Array] = {}
    with _progress_bar(leaves, shardings, is_shown=progress) as advance:
        for path, leaf in leaves.items():
            if path[-1] == "quantized":
                source = sources[*path[:-1], "kernel"]
                params |= _load_quantized(files, source, path, leaves, shardings, advance)
            elif path[-1] != "scales":  # loaded together with `quantized`
                params[path] = _load_leaf(files, sources[path], leaf, shardings[path], advance)
    return unflatten_params(params)


def _place(
    leaf: jax.ShapeDtypeStruct,
    sharding: Sharding | None,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """Makes an array on its devices from the parts that `read(index)` returns."""
    whole = (slice(None),) * len(leaf.shape)
    if sharding is None:
        return jax.device_put(read(whole))
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: read(whole if index is None else index), leaf.dtype
    )


def _load_leaf(
    files: Files,
    source: LeafSource,
    leaf: jax.ShapeDtypeStruct,
    sharding: Sharding | None,
    advance: Callable[[int], object],
) -> jax.Array:
    @functools.cache  # devices that hold the same part share one read
    def read(index: tuple[slice, ...]) -> np.ndarray:
        return read_shard(files, source, leaf.shape, index, leaf.dtype, advance=advance)

    return _place(leaf, sharding, read)


def _load_quantized(
    files: Files,
    source: LeafSource,
    path: tuple[str, ...],
    leaves: Mapping[tuple[str, ...], jax.ShapeDtypeStruct],
    shardings: Mapping[tuple[str, ...], Sharding | None],
    advance: Callable[[int], object],
) -> dict[tuple[str, ...], jax.Array]:
    """Loads a kernel as `quantized` and `scales`; equal shardings of both share one read."""
    leaf, num_outputs = leaves[path], len(source.stack) + len(source.outputs)
    scales: dict[tuple[slice, ...], np.ndarray] = {}  # keys: the stack and outputs

    @functools.cache
    def read_part(index: tuple[slice, ...]) -> np.ndarray:
        part, scales[index[:num_outputs]] = read_quantized(
            files, source, leaf.shape, index, leaf.dtype, advance=advance
        )
        return part

    def read_scales(index: tuple[slice, ...]) -> np.ndarray:
        if index not in scales:
            read_part((*index, *[slice(0, 1)] * (len(leaf.shape) - num_outputs)))
        return scales[index]

    beside = *path[:-1], "scales"
    return {
        path: _place(leaf, shardings[path], read_part),
        beside: _place(leaves[beside], shardings[beside], read_scales),
    }


@contextlib.contextmanager
def _progress_bar(
    leaves: Mapping[tuple[str, ...], jax.ShapeDtypeStruct],
    shardings: Mapping[tuple[str, ...], Sharding | None],
    *,
    is_shown: bool,
) -> Iterator[Callable[[int], object]]:
    total = 0
    for path, leaf in leaves.items():
        sharding = shardings[path]
        part = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        indices = sharding and sharding.addressable_devices_indices_map(leaf.shape).values()
        total += len(set(indices or [()])) * math.prod(part) * leaf.dtype.itemsize
    is_wanted = is_shown and jax.process_index() == 0
    with progress_bar(total, "loading", unit="B", unit_scale=True, is_wanted=is_wanted) as bar:
        yield bar.update


def find_sources(
    model_config: ModelConfig, *, keys: Mapping[tuple[str, ...], str] | None = None
) -> dict[tuple[str, ...], LeafSource]:
    """Finds the names of the stored tensors of every parameter.

    Args:
      model_config: The model.
      keys: Name of each parameter if not the family's, as in a GGUF file.

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
    keys = FAMILIES[model_config.model_type].keys if keys is None else keys
    sources = {}
    for path, leaf in flatten_params(param_shapes(model_config)).items():
        stack = leaf.shape[: num_stack_axes(path)]
        shape = leaf.shape[len(stack) :]
        if path == EMBEDDING:
            outputs, inputs = shape[:1], shape[1:]
        elif path[-1] == "kernel":
            inputs = input_axes(path, leaf.shape)
            outputs = shape[len(inputs) :]
        else:
            outputs, inputs = shape, ()
        numbers = [own_layers(model_config, path[1]), *map(range, stack[1:])] if stack else []
        sources[path] = LeafSource(
            names=tuple(
                keys[path].format(**dict(zip(("layer", "expert"), one, strict=False)))
                for one in itertools.product(*numbers)
            ),
            outputs=outputs,
            inputs=inputs,
            is_transposed=path[-1] == "kernel",
            stack=stack,
        )
    return sources


def check_headers(
    files: Files, sources: Mapping[tuple[str, ...], LeafSource], *, ignored: frozenset[str]
) -> None:
    """Compares the headers of the files with what the model needs.

    Args:
      files: The open files.
      sources: Sources of the parameters, from `find_sources`.
      ignored: Names of tensors that may exist without being needed.

    Raises:
      ValueError: If tensors are missing, unknown, of another shape or of a type that cannot be
        read; all of them in one message.
    """
    expected = {name: leaf.stored_shape for leaf in sources.values() for name in leaf.names}
    headers, notes, known = files.headers, files.notes, expected.keys() | ignored
    problems = {
        "missing": [
            f"{name} ({notes[name]})" if name in notes else name
            for name in expected
            if name not in headers
        ],
        "in several files": [
            f"{name} ({notes[name]})" for name in expected if name in headers and name in notes
        ],
        # Old files carry the rotary frequencies, which the config determines.
        "unknown": [
            name
            for name in headers
            if name not in known and not name.endswith("rotary_emb.inv_freq")
        ],
        "of a wrong shape": [
            f"{name} must be {shape}, got {headers[name].shape}"
            for name, shape in expected.items()
            if name in headers and headers[name].shape != shape
        ],
        "of an unsupported dtype": [
            f"{name} must be {files.readable_types}, got {headers[name].dtype}"
            for name in expected
            if name in headers and headers[name].dtype not in files.readable
        ],
    }
    if any(problems.values()):
        lines = [
            f"{len(found)} tensors {problem}: {'; '.join(sorted(found)[:LISTED])}"
            + (f"; and {len(found) - LISTED} more" if len(found) > LISTED else "")
            for problem, found in problems.items()
            if found
        ]
        if LM_HEAD in sources and problems["missing"] == list(sources[LM_HEAD].names):
            lines.append(
                "base models, embedding models and classifiers have no head, and give no logits: "
                "take the checkpoint of the language model; or set tie_word_embeddings to true in "
                "config.json if the embedding is the head"
            )
        raise ValueError(
            f"the weights in {files.source} must fit its {files.described_by}:\n  "
            + "\n  ".join(lines)
        )


def read_shard(
    files: Files,
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
      source: Source of the parameter.
      shape: The whole stacked shape.
      index: The part, a slice for each axis.
      dtype: Dtype of the result.
      advance: Called with the number of bytes after each tensor.

    Returns:
      The part, of `dtype`.
    """
    bounds = [slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
    part = np.empty([bound.stop - bound.start for bound in bounds], dtype)
    count = len(source.stack)
    names, bounds = source.names_of(bounds[:count]), bounds[count:]
    targets = part.reshape(-1, *part.shape[count:])
    # A kernel has its inputs first; view it in the order of the file.
    num_inputs = len(source.inputs) if source.is_transposed else 0
    order = [*range(num_inputs, len(bounds)), *range(num_inputs)]
    bounds = [bounds[axis] for axis in order]
    for target, name in zip(targets, names, strict=True):
        stored = target.transpose(order)
        for rows, block in _read_rows(files, source, name, bounds):
            stored[rows] = block
        advance(target.nbytes)
    return part


def _read_rows(
    files: Files, source: LeafSource, name: str, bounds: list[slice]
) -> Iterator[tuple[slice, np.ndarray]]:
    """Reads a part of one layer's parameter, a few rows at a time.

    A stored tensor has one row for each output and one column for each input; vectors have rows
    only. Only whole slices of the leading output axis and the leading input axis are cut in the
    file; inner axes, which are rarely sharded, are cut after reading.

    Args:
      files: The open files.
      source: Source of the parameter.
      name: The stored tensor.
      bounds: The part, a slice with start and stop for each output axis, then each input axis.

    Yields:
      A slice of the part's leading output axis, and its values, `[outputs..., inputs...]`.
    """
    num_outputs = len(source.outputs)
    outputs, inputs = bounds[:num_outputs], bounds[num_outputs:]
    rows = math.prod(source.outputs[1:])  # stored rows per index of the leading output axis
    columns, read_inputs = [], ()
    if inputs:
        per_index = math.prod(source.inputs[1:])
        columns = [slice(inputs[0].start * per_index, inputs[0].stop * per_index)]
        read_inputs = (inputs[0].stop - inputs[0].start, *source.inputs[1:])
    inner = (slice(None), *outputs[1:], *[slice(None) for _ in inputs[:1]], *inputs[1:])
    first, last = outputs[0].start, outputs[0].stop
    step = max(1, ROWS_PER_READ // rows)
    for start in range(first, last, step):
        stop = min(start + step, last)
        block = files.read(name, slice(start * rows, stop * rows), *columns)
        block = block.reshape(stop - start, *source.outputs[1:], *read_inputs)
        yield slice(start - first, stop - first), block[inner]


def read_quantized(
    files: Files,
    source: LeafSource,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
    *,
    advance: Callable[[int], object],
) -> tuple[np.ndarray, np.ndarray]:
    """Reads one device's part of a stack of kernels and quantises it, a few rows at a time.

    A scale depends on all inputs of its row, so whole rows are read and then cut: scales are the
    same for every sharding.

    Args:
      files: The open files.
      source: Source of the kernel.
      shape: The whole stacked shape `[stack..., outputs..., inputs...]`.
      index: The part, a slice for each axis.
      dtype: float8_e4m3fn or int8.
      advance: Called with the number of bytes after each tensor.

    Returns:
      The part of `quantized`, and the scales of its stack and outputs.

    Raises:
      ValueError: If a weight is NaN or infinite.
    """
    bounds = [slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
    sizes = [bound.stop - bound.start for bound in bounds]
    count = len(source.stack)
    end = count + len(source.outputs)
    part, scales = np.empty(sizes, dtype), np.empty(sizes[:end], np.float32)
    whole_rows = [*bounds[count:end], *[slice(0, size) for size in source.inputs]]
    cut = (*[slice(None)] * len(source.outputs), *bounds[end:])
    parts, all_scales = (x.reshape(-1, *x.shape[count:]) for x in (part, scales))
    for place, name in enumerate(source.names_of(bounds[:count])):
        for rows, block in _read_rows(files, source, name, whole_rows):
            found, all_scales[place, rows] = quantize_rows(
                block, dtype, num_inputs=len(source.inputs), name=name
            )
            parts[place, rows] = found[cut]
        advance(parts[place].nbytes + all_scales[place].nbytes)
    return part, scales


def resolve_tying(
    files: TensorFiles, model_config: ModelConfig, *, keys: Mapping[tuple[str, ...], str]
) -> tuple[bool, str, frozenset[str]]:
    """Decides which tensors are a tied checkpoint's embedding and lm_head, as transformers does.

    A tied file may hold either or both. If both exist and differ, the config is wrong.

    Args:
      files: The open files.
      model_config: The model as its config describes it.
      keys: Name of each parameter in the files.

    Returns:
      Whether the head is tied, the name of the embedding's tensor, and the tensors to ignore.
    """
    embedding, head = keys[EMBEDDING], keys[LM_HEAD]
    if not model_config.tie_word_embeddings or head not in files.headers:
        return model_config.tie_word_embeddings, embedding, frozenset()
    if embedding not in files.headers:
        return True, head, frozenset()
    expected = (model_config.vocab_size, model_config.hidden_size)
    shapes = {files.headers[name].shape for name in (embedding, head)}
    if shapes == {expected} and not _are_equal(files, embedding, head, num_rows=expected[0]):
        return False, embedding, frozenset()
    return True, embedding, frozenset({head})


def _are_equal(files: TensorFiles, first: str, second: str, *, num_rows: int) -> bool:
    for start in range(0, num_rows, ROWS_PER_READ):
        rows = slice(start, min(start + ROWS_PER_READ, num_rows)), slice(None)
        if not np.array_equal(files.read(first, *rows), files.read(second, *rows)):
            return False
    return True
