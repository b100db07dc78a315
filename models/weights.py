"""Loading of checkpoint directories into the stacked parameter tree.

Each parameter is read from the files straight into its stacked array, in its target dtype, and
only the part that each device holds. Beyond what is already loaded, the host never holds more
than one stacked parameter.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from sketchwalk_jax.models.checkpoint import load_saved
from sketchwalk_jax.models.checkpoint import save as save
from sketchwalk_jax.models.config import (
    DTYPES,
    SAVED_CONFIG_FILE,
    ModelConfig,
    check_directory,
    read_json,
)
from sketchwalk_jax.models.hf_config import checkpoint_dtype
from sketchwalk_jax.models.params import Params, flatten_params, param_shapes, unflatten_params
from sketchwalk_jax.models.placement import ParamsSharding, shardings_by_path
from sketchwalk_jax.models.tensor_files import FLOAT_DTYPES, TensorFiles
from sketchwalk_jax.models.tensor_map import (
    EMBEDDING,
    LeafSource,
    check_sources,
    find_sources,
    read_shard,
    resolve_tying,
)


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike | None = None,
    sharding: ParamsSharding = None,
    progress: bool = True,
) -> tuple[Params, ModelConfig]:
    """Loads a checkpoint directory: Hugging Face safetensors, or one written by `save`.

    Linear weights are transposed and the layers stacked, see `sketchwalk_jax.models.params` for
    the tree. Names and shapes are compared with the config before any weight is read.

    Args:
        directory: A local directory with ``config.json`` and safetensors files, single or
            sharded, or one written by `save`.
        dtype: Dtype of the parameters: float32, float16 or bfloat16. None keeps that of the
            checkpoint: what its config declares, else what its embedding is stored in.
        sharding: Where the parameters go. None: the default device. One
            `jax.sharding.Sharding`: that for all. Else a tree of them with the layout of the
            parameters, or a function of a parameter's path (a tuple such as
            ``("layers", "query", "kernel")``) and its `jax.ShapeDtypeStruct` that returns one.
            Each process reads only what its devices hold.
        progress: Whether to show a progress bar on standard error when it takes longer than a
            second.

    Returns:
        The parameters and the model's configuration.

    Raises:
        FileNotFoundError: If the directory, its config or files of its index are missing.
        ValueError: If the weights are not safetensors, a file is truncated or corrupt, or tensors
            are missing, unknown, of another shape or not floating point (all listed at once).
        NotImplementedError: If the config asks for what is not implemented.

    Example:
        >>> params, model_config = load("Llama-3.2-1B", dtype="bfloat16")  # doctest: +SKIP
        >>> params["layers"]["query"]["kernel"].shape  # doctest: +SKIP
        (16, 2048, 32, 64)
    """
    target = None if dtype is None else _param_dtype(dtype)
    directory = check_directory(directory)
    if (directory / SAVED_CONFIG_FILE).exists():
        return load_saved(directory, dtype=target, sharding=sharding)
    model_config = ModelConfig.from_pretrained(directory)
    with TensorFiles(directory) as files:
        is_tied, embedding, ignored = resolve_tying(files, model_config)
        if is_tied != model_config.tie_word_embeddings:
            warnings.warn(
                f"{directory} declares tied embeddings but holds a different lm_head.weight; the "
                f"lm_head is used. Set tie_word_embeddings to false in config.json",
                stacklevel=2,
            )
            model_config = dataclasses.replace(model_config, tie_word_embeddings=is_tied)
        sources = find_sources(model_config, embedding=embedding)
        check_sources(files, sources, ignored=ignored)
        if checkpoint_dtype(read_json(directory / "config.json")) is None:
            stored = FLOAT_DTYPES[files.headers[sources[EMBEDDING].names[0]].dtype]
            stored = stored if stored in DTYPES else "float32"
            model_config = dataclasses.replace(model_config, dtype=stored)
        shapes = param_shapes(model_config, target)
        shardings = shardings_by_path(sharding, shapes)
        params = {}
        with _progress_bar(shapes, shardings, is_shown=progress) as advance:
            for path, shape in flatten_params(shapes).items():
                params[path] = _load_leaf(files, sources[path], shape, shardings[path], advance)
    return unflatten_params(params), model_config


def _param_dtype(dtype: DTypeLike) -> np.dtype:
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {jnp.dtype(dtype).name!r}")
    return jnp.dtype(dtype)


def _load_leaf(
    files: TensorFiles,
    source: LeafSource,
    shape: jax.ShapeDtypeStruct,
    sharding: Sharding | None,
    advance: Callable[[int], object],
) -> jax.Array:
    parts: dict[tuple[slice, ...], np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(shape.shape) if index is None else index
        # Devices that hold the same part share one read.
        if index not in parts:
            parts[index] = read_shard(
                files, source, shape.shape, index, shape.dtype, advance=advance
            )
        return parts[index]

    if sharding is None:
        return jax.device_put(read(None))
    return jax.make_array_from_callback(shape.shape, sharding, read, dtype=shape.dtype)


@contextlib.contextmanager
def _progress_bar(
    shapes: Params, shardings: dict[tuple[str, ...], Sharding | None], *, is_shown: bool
) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    total = 0
    for path, shape in flatten_params(shapes).items():
        sharding = shardings[path]
        part = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
        indices = sharding and sharding.addressable_devices_indices_map(shape.shape).values()
        total += len(set(indices or [()])) * int(np.prod(part)) * shape.dtype.itemsize
    with tqdm(
        total=total,
        desc="loading",
        unit="B",
        unit_scale=True,
        delay=1,
        disable=not is_shown or jax.process_index() != 0,
        file=sys.stderr,
    ) as bar:
        yield bar.update
