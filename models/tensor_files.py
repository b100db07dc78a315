"""Reads the safetensors files of a Hugging Face checkpoint directory lazily.

Opening reads headers only, so the caller can check names, shapes and dtypes of all tensors before
the first byte of a weight is read. Pickles and code of the checkpoint are never loaded.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from sketchwalk_jax.models.family import describe_damage, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The safetensors dtypes that can be loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Description of one tensor in a file.

    Attributes:
      file: Name of the file that holds it.
      shape: Its shape, as stored.
      dtype: Its safetensors dtype, such as "BF16".
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles(contextlib.AbstractContextManager["TensorFiles"]):
    """All tensors of a checkpoint directory by name; a context manager that closes the files.

    Attributes:
      source: The checkpoint directory.
      described_by: The file that describes the model, for errors.
      headers: Header of each tensor by name. If several files hold a tensor, the index decides
        which.
      notes: Disagreements of the index and the files about tensors, by name.
      readable: The dtypes that can be read.
      readable_types: These dtypes in words, for errors.
    """

    described_by = "config.json"
    readable = tuple(FLOAT_DTYPES)
    readable_types = f"one of {', '.join(FLOAT_DTYPES)}"

    def __init__(self, directory: Path) -> None:
        """Opens every file and reads its header.

        Args:
          directory: An existing checkpoint directory.

        Raises:
          FileNotFoundError: If there are no weights, or files of the index are missing.
          ValueError: If the weights are not safetensors, a file is truncated or corrupt, or
            the index is invalid.
        """
        self.source = directory
        self.headers: dict[str, TensorHeader] = {}
        self.notes: dict[str, str] = {}
        self._index = _read_index(directory)
        self._holders: dict[str, list[str]] = {}
        self._handles: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        try:
            for file in sorted(set(self._index.values())) or [SINGLE_FILE]:
                self._open(file)
        except BaseException:
            self._stack.close()
            raise
        self._note_disagreements()

    def _open(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.source / file
        try:
            handle = self._stack.enter_context(safe_open(path, framework="np"))
        except SafetensorError as error:
            is_newer = "unknown variant" in str(error)
            advice = (
                "it is newer than the installed package: pip install --upgrade safetensors"
                if is_newer
                else describe_damage(path)
            )
            raise ValueError(
                f"{path} must be a complete safetensors file, got {error}; {advice}"
            ) from error
        self._handles[file] = handle
        for name in handle.keys():
            self._holders.setdefault(name, []).append(file)
            # Shards may hold old copies of tensors that the index finds in other shards.
            if self._index.get(name, file) == file:
                tensor = handle.get_slice(name)
                self.headers[name] = TensorHeader(
                    file=file, shape=tuple(tensor.get_shape()), dtype=tensor.get_dtype()
                )

    def _note_disagreements(self) -> None:
        for name, own in self._index.items():
            holders = self._holders.get(name, [])
            if own not in holders:
                others = f", found in {' and '.join(holders)}" if holders else ""
                self.notes[name] = f"the index names {own}, which lacks it{others}"
        for name, holders in self._holders.items():
            if len(holders) > 1 and name not in self._index:
                self.notes[name] = f"{' and '.join(holders)} have it, the index names neither"

    def read(self, name: str, *bounds: slice) -> np.ndarray:
        """Reads a part of a tensor.

        Args:
          name: Name of the tensor.
          *bounds: A slice with start and stop for each axis.

        Returns:
          The part in the stored dtype.
        """
        tensor = self._handles[self.headers[name].file].get_slice(name)
        # safetensors does not accept a tuple of one slice.
        return tensor[bounds if len(bounds) > 1 else bounds[0]]

    def __exit__(self, *exception: object) -> None:
        """Closes every file."""
        self._handles.clear()
        self._stack.close()


def _read_index(directory: Path) -> dict[str, str]:
    """Reads the file of each tensor from the index; empty if one file holds all tensors."""
    if (directory / SINGLE_FILE).exists():
        return {}
    if (directory / INDEX_FILE).exists():
        return _checked_index(directory)
    shards = sorted(file.name for file in directory.glob("*.safetensors"))
    if shards:
        raise FileNotFoundError(
            f"{directory} must hold {SINGLE_FILE} or {INDEX_FILE}, got only {shards[:20]}; copy "
            f"the index that belongs to these files, or rename a file that holds the whole model"
        )
    others = sorted(file.name for file in directory.iterdir() if file.suffix in OTHER_FORMATS)
    if others:
        advice = (
            "pass one of the GGUF files itself"
            if any(file.endswith(".gguf") for file in others)
            else "download the safetensors version, or convert it with transformers' "
            "save_pretrained"
        )
        raise ValueError(
            f"{directory} must hold {SINGLE_FILE} or {INDEX_FILE}, got {others}; {advice}"
        )
    raise FileNotFoundError(
        f"{directory} must hold {SINGLE_FILE} or {INDEX_FILE}, got neither; download the "
        f"weights as well"
    )


def _checked_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} must have a weight_map of tensor names to file names")
    index = {name: str(file) for name, file in weight_map.items()}
    files = sorted(set(index.values()))
    # Accept plain names only: an untrusted index must not lead outside the folder.
    outside = [file for file in files if Path(file).name != file or "\\" in file]
    if outside:
        raise ValueError(f"{path} must name files beside it, got {outside}")
    wrong = [file for file in files if not file.endswith(".safetensors")]
    if wrong:
        raise ValueError(f"{path} must name safetensors files, got {wrong}")
    missing = [file for file in files if not (directory / file).exists()]
    if missing:
        raise FileNotFoundError(
            f"{directory} must hold the {len(files)} files of its index, {missing} are missing; "
            f"download them"
        )
    return index
