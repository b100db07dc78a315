"""Saves and loads the stacked parameter tree with Orbax.

A saved directory holds `model_config.json`, the Orbax checkpoint `params/`, and the model's plan if
it has one. Loading needs no transposition or stacking, and reads only the shards of each device.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.models.config import PARAMS_FOLDER, SAVED_CONFIG_FILE, ModelConfig
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.params import (
    QUANTIZED,
    QUANTIZED_DTYPES,
    Params,
    ParamsSharding,
    check_params,
    flatten_params,
    param_shapes,
    shardings_by_path,
    unflatten_params,
    weights_of_dtypes,
)
from sketchwalk_jax.models.plans import fingerprint
from sketchwalk_jax.models.quantized import quantize_params
from sketchwalk_jax.plan import plan_path

FORMAT_VERSION = 1


def save(
    directory: str | Path, params: Params, model_config: ModelConfig, *, overwrite: bool = False
) -> None:
    """Writes parameters and configuration into a directory that `load` can read.

    The directory is first written under another name and then renamed, so it is never incomplete.
    In a multi-process program, every process must call this function.

    Args:
      directory: Directory to write. Parent directories are created.
      params: The parameter tree, in float32, float16 or bfloat16, with any sharding. Quantised
        weights are saved as they are.
      model_config: The model's configuration. Its plan is saved as the plan of the new directory.
      overwrite: Whether to replace a directory that is not empty.

    Raises:
      FileExistsError: If the directory is not empty and `overwrite` is False.
      ValueError: If the parameters do not fit the configuration.

    Example:
      >>> save("model", params, model_config)  # doctest: +SKIP
      >>> params, model_config = load("model")  # doctest: +SKIP
    """
    import orbax.checkpoint as ocp

    check_params(params, model_config)
    leaves = flatten_params(params).items()
    dtypes = {"/".join(path): jnp.dtype(leaf.dtype).name for path, leaf in leaves}
    target = Path(directory).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"must be a directory, got the file {str(target)!r}")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(
            f"must be a new or empty directory, got {str(target)!r}; pass overwrite=True to "
            f"replace it"
        )
    with _written_beside(target) as partial:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / PARAMS_FOLDER, params)
            checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            # The plan goes to its own file, whose fingerprint ties it to this checkpoint.
            plan, fields = model_config.plan, dataclasses.asdict(model_config)
            del fields["plan"]
            saved = {"format_version": FORMAT_VERSION, "model_config": fields, "dtypes": dtypes}
            (partial / SAVED_CONFIG_FILE).write_text(json.dumps(saved, indent=2) + "\n")
            if plan is not None:
                own = dataclasses.replace(plan, fingerprint=fingerprint(partial))
                own.write(plan_path(partial), measured={"fingerprint": plan.fingerprint})


def load_saved(
    directory: Path,
    *,
    dtype: np.dtype | None = None,
    weights: str | None = None,
    sharding: ParamsSharding = None,
) -> tuple[Params, ModelConfig]:
    """Loads a directory written by `save`; `sketchwalk_jax.models.load` calls it.

    Args:
      directory: The directory.
      dtype: Dtype of the parameters; None keeps each array's saved dtype.
      weights: As in `sketchwalk_jax.models.load`; None keeps the saved kind.
      sharding: Placement of the parameters, as in `sketchwalk_jax.models.load`.

    Returns:
      The parameters and the model's configuration.

    Raises:
      ValueError: If the directory is damaged, incomplete, or written by a newer version; or if it
        holds quantised weights of another kind than `weights`.
    """
    saved = read_json(directory / SAVED_CONFIG_FILE)
    if saved.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"format_version of {directory / SAVED_CONFIG_FILE} must be {FORMAT_VERSION}, "
            f"got {saved.get('format_version')!r}; a newer sketchwalk_jax may read it"
        )
    model_config = ModelConfig.from_pretrained(directory)
    dtypes = saved.get("dtypes", {})
    stored = saved_weights(dtypes, directory, weights)
    shapes = param_shapes(model_config, weights=stored)
    shardings = shardings_by_path(sharding, shapes)
    default = jnp.zeros(()).sharding
    wanted = {
        path: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype
            if path[-1] in QUANTIZED
            else dtype or jnp.dtype(dtypes.get("/".join(path), model_config.dtype)),
            sharding=shardings[path] or default,
        )
        for path, leaf in flatten_params(shapes).items()
    }
    folder = directory.resolve() / PARAMS_FOLDER
    if stored is not None or weights is None:
        return unflatten_params(_restore(folder, wanted, set(wanted))), model_config
    kernels = [path for path in wanted if path[0] == "layers" and path[-1] == "kernel"]
    found = _restore(folder, wanted, set(wanted) - set(kernels))
    # One stack of layers at a time, to bound the memory of unquantised weights.
    for path in kernels:
        wide = unflatten_params(_restore(folder, wanted, {path}))
        found |= flatten_params(quantize_params(wide, weights))
    return unflatten_params(found), model_config


def _restore(
    folder: Path,
    wanted: Mapping[tuple[str, ...], jax.ShapeDtypeStruct],
    paths: Set[tuple[str, ...]],
) -> dict[tuple[str, ...], jax.Array]:
    """Reads arrays of a checkpoint.

    Args:
      folder: Folder of the checkpoint.
      wanted: All arrays of the checkpoint.
      paths: Paths of the arrays to read.

    Raises:
      ValueError: If the checkpoint is damaged or incomplete.
    """
    import orbax.checkpoint as ocp

    # Orbax compares the whole tree with the files, and skips arrays with a placeholder.
    tree = unflatten_params(
        {path: leaf if path in paths else ocp.PLACEHOLDER for path, leaf in wanted.items()}
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(
                folder, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args)
            )
    # Orbax and tensorstore raise many types for missing or damaged files.
    except Exception as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise ValueError(
            f"{folder} must be a complete checkpoint written by sketchwalk_jax.models.save, got "
            f"{type(error).__name__}: {reason}"
        ) from error
    return {path: leaf for path, leaf in flatten_params(found).items() if path in paths}


def saved_weights(
    dtypes: Mapping[str, str], directory: Path, weights: str | None = None
) -> str | None:
    """Tells how the layers of a saved directory are quantised, from the dtypes of its arrays.

    Args:
      dtypes: Names of dtypes by the paths of arrays.
      directory: The directory, for the error message.
      weights: The requested kind; None takes the saved one.

    Raises:
      ValueError: If the layers are quantised in another way than requested, or in one that only an
        older version could read.

    Example:
      >>> saved_weights({"layers/gate/quantized": "int8"}, Path("saved"))
      'int8'
    """
    kinds = {dtype for path, dtype in dtypes.items() if path.endswith("/quantized")}
    if kinds - set(QUANTIZED_DTYPES.values()):
        raise ValueError(
            f"{directory} must hold weights in one of {tuple(QUANTIZED_DTYPES)}, got arrays of "
            f"{' and '.join(sorted(kinds))}, which another version wrote; load the checkpoint that "
            f"it was made of"
        )
    stored = weights_of_dtypes(kinds)
    if stored is not None and weights not in (None, stored):
        raise ValueError(
            f"weights must be {stored!r} or left out, as {directory} holds such weights, got "
            f"{weights!r}; load the checkpoint that it was made of"
        )
    return stored


@contextlib.contextmanager
def _written_beside(target: Path) -> Iterator[Path]:
    """Yields a new folder that replaces `target` if the block ends without an error."""
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    is_first = jax.process_index() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait_for_processes("created")
    try:
        yield partial
        _wait_for_processes("written")
        if is_first:
            replace_folder(target, partial, replaced)
        _wait_for_processes("renamed")
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)


def replace_folder(target: Path, new: Path, replaced: Path) -> None:
    """Renames `new` to `target`, atomically if the system can.

    Linux exchanges two names in one step. Elsewhere the old folder is first renamed to `replaced`,
    where it survives if the process is killed between the two steps.

    Args:
      target: The folder to replace.
      new: A finished folder in the same parent folder.
      replaced: An unused name in the same parent folder.
    """
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists() and _exchange(target, new):
        shutil.rmtree(new, ignore_errors=True)
        return
    if target.exists():
        os.replace(target, replaced)
    try:
        os.replace(new, target)
    except OSError:
        if replaced.exists():
            os.replace(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _wait_for_processes(step: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"sketchwalk_jax save {step}")
