"""Finds the plan of a checkpoint, in a file that names the checkpoint's fingerprint.

A plan states what each layer of one model loses (`sketchwalk_jax.plan`). For other weights it would
be silently wrong, so a plan is used only if its fingerprint equals the checkpoint's.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sketchwalk_jax.models.config import (
    PARAMS_FOLDER,
    SAVED_CONFIG_FILE,
    ModelConfig,
    check_checkpoint,
)
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.gguf_header import read_header
from sketchwalk_jax.models.tensor_files import TensorFiles
from sketchwalk_jax.plan import Plan, plan_path

# Number and size of the pieces read from each weight file; a smaller file is read whole.
_PIECES, _PIECE_BYTES = 64, 4096
# Fields that change no layer: the plan, and tokens that users often edit.
_LEFT_OUT = ("plan", "bos_token_id", "eos_token_ids")


def fingerprint(checkpoint: str | Path) -> str:
    """Computes a fingerprint of a checkpoint's contents without reading all of it.

        SHA-256(configuration, name, shape and type of every tensor, pieces of every weight file)

    In a file of more than 256 KiB these are 64 evenly spread pieces of 4 KiB, the first and the
    last bytes included; a training step or another quantisation changes each of them. Names of
    files and folders, the tokenizer, end tokens and a plan do not count.

    Args:
      checkpoint: A Hugging Face directory, one of `save`, or a GGUF file.

    Returns:
      64 hexadecimal digits.

    Raises:
      FileNotFoundError: If the directory, its config or files of its index are missing.
      ImportError: If the file is GGUF and the package `gguf` is missing.
      ValueError: If a file is damaged or the model is not supported.
      NotImplementedError: If the config needs unimplemented features.

    Example:
      >>> fingerprint("Llama-3.2-1B")[:12]  # doctest: +SKIP
      '1f2d0a3b9c4e'
    """
    found = check_checkpoint(checkpoint)
    fields = _fields_set(ModelConfig.from_pretrained(found))
    for name in _LEFT_OUT:
        fields.pop(name, None)
    headers, files = stored_tensors(found)
    digest = hashlib.sha256(json.dumps([fields, headers], sort_keys=True).encode())
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        for piece in _sample(path):
            digest.update(piece)
    return digest.hexdigest()


def find_plan(checkpoint: str | Path) -> Plan | None:
    """Reads the plan in a checkpoint's directory, if there is one.

    Args:
      checkpoint: As in `fingerprint`.

    Returns:
      The plan; None without a file.

    Raises:
      ValueError: If the file is damaged, or the plan is of another checkpoint.
      FileNotFoundError: As `fingerprint`, which also raises the other errors.
    """
    found = check_checkpoint(checkpoint)
    path = plan_path(found)
    if not path.exists():
        return None
    plan = Plan.read(path)
    advice = (
        f"delete it, or measure one for this checkpoint: "
        f"sketchwalk calibrate --model {found} --overwrite"
    )
    num_layers = ModelConfig.from_pretrained(found).num_layers
    if plan.num_layers != num_layers:
        raise ValueError(
            f"{path} must be a plan of {num_layers} layers, as the checkpoint has, got "
            f"{plan.num_layers}; {advice}"
        )
    own = fingerprint(found)
    if plan.fingerprint != own:
        raise ValueError(
            f"{path} must be the plan of this checkpoint, whose fingerprint is {own[:12]}, got one "
            f"of {plan.fingerprint[:12] or 'an unknown one'}; {advice}"
        )
    return plan


def _fields_set(config: Any) -> dict[str, Any]:
    """Returns fields that differ from their defaults, so that new fields change no fingerprint."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        field.name: _fields_set(values[field.name])
        if dataclasses.is_dataclass(values[field.name])
        else values[field.name]
        for field in dataclasses.fields(config)
        if values[field.name] != field.default
    }


def stored_tensors(checkpoint: Path) -> tuple[list[Any], list[Path]]:
    """Lists of name, shape and type of every tensor, and the files that hold them, both sorted.

    A directory of `save` does not tell the shapes, so its lists have name and type only.
    """
    if checkpoint.is_file():
        tensors = read_header(checkpoint).tensors
        return [[name, one.shape, one.dtype] for name, one in sorted(tensors.items())], [checkpoint]
    if (checkpoint / SAVED_CONFIG_FILE).exists():
        dtypes = read_json(checkpoint / SAVED_CONFIG_FILE).get("dtypes", {})
        files = sorted((checkpoint / PARAMS_FOLDER).rglob("*"))
        return sorted(map(list, dtypes.items())), [path for path in files if path.is_file()]
    with TensorFiles(checkpoint) as opened:
        headers = sorted(opened.headers.items())
    names = sorted({header.file for _, header in headers})
    return [[name, one.shape, one.dtype] for name, one in headers], [checkpoint / n for n in names]


def _sample(path: Path) -> Iterator[bytes]:
    """Reads pieces of a file at fixed places, both ends included; a small file whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _PIECES * _PIECE_BYTES:
            yield file.read()
            return
        for index in range(_PIECES):
            file.seek(index * (size - _PIECE_BYTES) // (_PIECES - 1))
            yield file.read(_PIECE_BYTES)
