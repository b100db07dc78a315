"""Defines a model family as one record, which `llama.py` and `qwen.py` fill in.

One transformer serves all families. They differ only in the names of their weights and in the
meaning of their `config.json`, and a family states both. README.md in this folder has an example.

A `config.json` may hold anything, so attributes are read with their types, and other types are
refused by name. Absent and null mean the default; a number in quotes is no number.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RawConfig = Mapping[str, Any]
"""A parsed `config.json`."""

LAYER = "model.layers.{layer}."
"""Prefix of the names of a layer's weights; `{layer}` is the layer's index."""

KEYS: dict[tuple[str, ...], str] = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("layers", "attn_norm", "scale"): LAYER + "input_layernorm.weight",
    ("layers", "query", "kernel"): LAYER + "self_attn.q_proj.weight",
    ("layers", "query", "bias"): LAYER + "self_attn.q_proj.bias",
    ("layers", "key", "kernel"): LAYER + "self_attn.k_proj.weight",
    ("layers", "key", "bias"): LAYER + "self_attn.k_proj.bias",
    ("layers", "value", "kernel"): LAYER + "self_attn.v_proj.weight",
    ("layers", "value", "bias"): LAYER + "self_attn.v_proj.bias",
    ("layers", "out", "kernel"): LAYER + "self_attn.o_proj.weight",
    ("layers", "out", "bias"): LAYER + "self_attn.o_proj.bias",
    ("layers", "mlp_norm", "scale"): LAYER + "post_attention_layernorm.weight",
    ("layers", "gate", "kernel"): LAYER + "mlp.gate_proj.weight",
    ("layers", "gate", "bias"): LAYER + "mlp.gate_proj.bias",
    ("layers", "up", "kernel"): LAYER + "mlp.up_proj.weight",
    ("layers", "up", "bias"): LAYER + "mlp.up_proj.bias",
    ("layers", "down", "kernel"): LAYER + "mlp.down_proj.weight",
    ("layers", "down", "bias"): LAYER + "mlp.down_proj.bias",
    ("final_norm", "scale"): "model.norm.weight",
    ("lm_head", "kernel"): "lm_head.weight",
}
"""Hugging Face name of each parameter of Llama and most families; `{layer}` is the index of one of
the layers that are stacked here."""

MAX_LAYERS = 10_000
"""Most layers that a file may declare: all tensor names are generated before any is looked up."""

MAX_EXPERTS = 100_000
"""Most experts that a file may declare in all layers together, for the same reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family of Hugging Face checkpoints.

    Absent attributes of `config.json` take the defaults of transformers' class of that
    `model_type`.

    Attributes:
      model_type: The `model_type` of its `config.json`.
      keys: Hugging Face name of each parameter by its path in the tree of `models.params`;
        names of parameters that a model lacks are allowed.
      read_fields: Reads from a parsed `config.json` the fields of `ModelConfig` that are specific
        to the family: heads, head_dim, context, biases, norms, begin token.
      read_window: Reads the sliding window of the file in tokens, or None; and the first layer to
        which it applies if there are no `layer_types`.
      own_attributes: Attributes that the family reads, though their names are like those that other
        families must refuse.
    """

    model_type: str
    keys: Mapping[tuple[str, ...], str]
    read_fields: Callable[[RawConfig], dict[str, Any]]
    read_window: Callable[[RawConfig], tuple[int | None, int]]
    own_attributes: frozenset[str] = frozenset()


_OTHER_FILES = {
    (b"version https://git-lfs",): "a pointer of Git LFS; run `git lfs pull` in its folder",
    (b"<",): "a web page; download the file that it links to",
    (b"PK\x03\x04", b"\x80\x02"): (
        "a file of PyTorch; convert it with transformers' save_pretrained"
    ),
    (b"GGUF",): "a GGUF file; give it a name that ends in .gguf, and pass it itself",
    (b"tjgg", b"fmgg", b"lmgg"): (
        "of a format before GGUF; convert the model with a current llama.cpp"
    ),
}
"""Other contents of files with weight names, by their first bytes."""


def describe_damage(path: Path, remedy: str = "download it again") -> str:
    """Describes an unreadable file and the remedy, for error messages."""
    with path.open("rb") as file:
        begin = file.read(32)
    others = (what for starts, what in _OTHER_FILES.items() if begin.startswith(starts))
    return f"it is {next(others, f'truncated or corrupt, {remedy}')}"


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object; errors name the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} does not exist: {str(path.parent)!r} must be a checkpoint directory with "
            f"{path.name} and its safetensors files"
        ) from error
    except (ValueError, RecursionError) as error:
        advice = describe_damage(path, "correct it or copy it again")
        raise ValueError(f"{path} must be a JSON file, got {error}; {advice}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def read_integer(
    raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1
) -> Any:
    """Reads an integer of at least `least`, such as a size.

    Args:
      raw: A parsed JSON object.
      name: Name of the attribute.
      default: Value if absent or null.
      least: The smallest value.

    Raises:
      ValueError: If the attribute has another type or an invalid value.

    Example:
      >>> read_integer({"num_hidden_layers": 12}, "num_hidden_layers")
      12
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {wanted}, got {_short(value)}; correct config.json")
    return value


def read_token(raw: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Reads a token id; -1 and null mean none. Arguments and errors as in `read_integer`.

    Example:
      >>> read_token({"bos_token_id": -1}, "bos_token_id", 1)
    """
    found = read_integer({name: default, **raw}, name, least=-1)
    return None if found == -1 else found


def read_number(
    raw: Mapping[str, Any], name: str, default: float | None = None, *, above: float = -math.inf
) -> Any:
    """Reads a finite number larger than `above`, as a float.

    Other arguments and errors as in `read_integer`.

    Example:
      >>> read_number({"rope_theta": 500000}, "rope_theta", above=1.0)
      500000.0
    """
    value = raw.get(name)
    if value is None:
        return default
    limit = f" larger than {above:g}" if above > -math.inf else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON integers of any size are valid, but may be infinite as floats.
    if not is_number or not -1e300 < value < 1e300 or not value > above:
        raise ValueError(
            f"{name} must be a finite number{limit}, got {_short(value)}; correct config.json"
        )
    return float(value)


def read_flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Reads a boolean. Arguments and errors as in `read_integer`.

    Example:
      >>> read_flag({"attention_bias": True}, "attention_bias")
      True
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_short(value)}; correct config.json")
    return value


def read_object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads a JSON object; absent, null and empty values mean one without attributes.

    Arguments and errors as in `read_integer`.

    Example:
      >>> read_object({"rope_scaling": None}, "rope_scaling")
      {}
    """
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {_short(value)}; correct config.json")
    return value


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 80 else f"{text[:77]}..."
