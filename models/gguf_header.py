"""Reads the header of a GGUF file, and translates the model that it describes.

A GGUF file (llama.cpp's format) holds a whole checkpoint: metadata in place of `config.json` and
the tokenizer's files, then the tensors. The package `gguf` reads the header; this module turns it
into plain values and a Hugging Face config, so that `hf_config.translate` alone decides what is
supported. `gguf_files.py` reads the tensors. GGUF files contain no code.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sketchwalk_jax.models.family import describe_damage
from sketchwalk_jax.models.rope import RopeConfig, rope_frequencies

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""The `model_type` of each `general.architecture` that loads."""

ROPE_FREQS = "rope_freqs.weight"
"""The tensor in which Llama 3.1 and later keep the rescaling of their rotary frequencies."""

_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Attribute of `config.json` for each key of the metadata, after the architecture's name."""

_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""The same for a mixture of experts."""

_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)

_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Attribute of `rope_scaling` for each key of the metadata, after the architecture's name."""

_HARMLESS: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "embedding_scale": 1,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "expert_weights_scale": 1,
    "rope.dimension_sections": None,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
"""Keys that change the computation and have no name in `config.json`, with their neutral value;
`hf_config.RESULT_CHANGING` has the others."""

_END_FIELDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Fields of the metadata, as `tokenizer.ggml.{field}_token_id`, whose tokens end a generation."""

_END_NAMES = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
"""Tokens that end a generation wherever a vocabulary has them."""

_TEXT = 1
"""Kind of the tokens that are ordinary text."""

_FIM_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Names of the tokens of the last three fields, where the metadata has none."""

# RoPE scaling of Llama 3.1 and later; only the factor differs between models. The tensor of
# frequencies does not name it, so it is compared with the frequencies that these values give.
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Description of one tensor in the header.

    Attributes:
      shape: Its shape, rows first; the file stores it reversed.
      dtype: Its type in ggml, such as "Q4_K".
      start: Offset of its bytes in the file.
      num_bytes: Number of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """The header of a GGUF file; the file need not stay open.

    Attributes:
      path: The file.
      metadata: Every key and its value: numbers, booleans, strings, and lists of these.
      tensors: Description of each tensor, by its name in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its contents or its name."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def import_gguf() -> types.ModuleType:
    """Imports the package `gguf`, or raises an `ImportError` that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            'GGUF files must have the package gguf to be read: pip install "sketchwalk-jax[gguf]"'
        ) from error
    return gguf


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Reads the header of a GGUF file, but no tensor.

    Reading a large vocabulary takes seconds, and a model and its tokenizer share one header, so the
    headers of the last two files are kept until the files change.

    Args:
      path: The file.

    Returns:
      Its metadata and the description of its tensors.

    Raises:
      ImportError: If the package `gguf` is missing.
      ValueError: If it is not GGUF of version 2 or 3, is big-endian, is truncated or corrupt, or is
        one of several parts.
    """
    path = Path(path)
    with path.open("rb") as file:
        begin, status = file.read(8), os.fstat(file.fileno())
    if begin[:4] != MAGIC:
        raise ValueError(
            f"{path} must be a GGUF file, which begins with {MAGIC!r}, got {begin[:4]!r}; "
            f"{describe_damage(path)}"
        )
    if len(begin) < 8:
        raise _damaged(path, f"only {len(begin)} bytes")
    # The package reads big-endian headers, but dequantises only little-endian blocks.
    version = int.from_bytes(begin[4:], "little")
    if version & 0xFFFF == 0:
        raise ValueError(f"{path} must be little-endian, got a big-endian GGUF file")
    if version not in VERSIONS:
        raise ValueError(
            f"{path} must be GGUF of version 2 or 3, got version {version}; convert the model "
            f"again with a current llama.cpp"
        )
    header = _read_with_gguf(
        path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    )
    count = header.metadata.get("split.count", 1)
    if count > 1:
        raise ValueError(
            f"{path} must be a whole model, got one of {count} parts; merge them first: "
            f"llama-gguf-split --merge FIRST_PART.gguf MERGED.gguf"
        )
    return header


@functools.lru_cache(maxsize=2)
def _read_with_gguf(path: Path, state: tuple[int, ...]) -> GgufHeader:
    """Reads a header; `state` is a cache key that changes when the file is rewritten."""
    del state
    gguf = import_gguf()
    base: Any = gguf.GGUFReader

    class Reader(base):
        """The package's reader, which slices everything from its attribute `data`."""

        @property
        def data(self) -> np.ndarray:
            return self._bytes

        @data.setter
        def data(self, content: np.ndarray) -> None:
            self._bytes = content.view(_Bytes)

    try:
        with np.errstate(over="raise"):  # an offset that wraps round would pass as valid
            reader = Reader(path)
        return GgufHeader(
            path=path,
            metadata={
                name: _as_written(field.contents(), field.types == [gguf.GGUFValueType.FLOAT32])
                for name, field in reader.fields.items()
            },
            tensors={
                tensor.name: GgufTensor(
                    shape=tuple(reversed(tensor.shape.tolist())),
                    dtype=tensor.tensor_type.name,
                    start=tensor.data_offset,
                    num_bytes=tensor.n_bytes,
                )
                for tensor in reader.tensors
            },
        )
    except EOFError as error:
        raise _damaged(path, f"one that goes on after its {path.stat().st_size} bytes") from error
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise _damaged(
            path,
            f"{error!r} from gguf",
            ", or newer than the installed package: pip install --upgrade gguf",
        ) from error


class _Bytes(np.ndarray):
    """The bytes of a file; slices past the end raise an error.

    The reader would accept a short slice of a `np.memmap`, and loop for ever if an array's length
    is wrong. Slices are plain arrays, because slicing a `np.memmap` takes three times as long.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and (key.stop or 0) > self.size:
            raise EOFError
        return self.view(np.ndarray)[key]


def _as_written(value: Any, is_float32: bool) -> Any:
    """Restores a number such as 1e-5 that was stored as the nearest float32."""
    return float(str(np.float32(value))) if is_float32 else value


def _damaged(path: Path, found: str, more: str = "") -> ValueError:
    """Makes the error for a file that contradicts its header."""
    return ValueError(
        f"{path} must be a complete GGUF file, got {found}; it is truncated or corrupt, download "
        f"it again{more}"
    )


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Translates a header into the `config.json` of the model.

    The head is tied if the file has no `output.weight`, and biases exist if their tensors do. End
    tokens are chosen as in llama.cpp, see `end_token_ids`.

    The dtype is that of the stored weights, or bfloat16 if they are quantised: such models were
    published in it, GPUs compute in it, and it takes half the memory of float32. Rounding to it
    changes a weight by at most 1/512 of its value, less than quantisation did. Quantised values are
    exact in float32.

    Args:
      header: The header of a GGUF file.

    Returns:
      The argument of `hf_config.translate`.

    Raises:
      ValueError: If the architecture is not supported or keys are missing.
      NotImplementedError: If the file needs unimplemented features; all of them are listed.
    """
    if header.metadata.get("general.type") == "adapter":
        raise ValueError(
            f"{header.path} must be a model, got an adapter, which changes one; merge it into its "
            f"model first: llama-export-lora --model MODEL.gguf --lora {header.path.name}"
        )
    architecture = header.metadata.get("general.architecture")
    if architecture not in tuple(ARCHITECTURES):  # it may be a list
        raise ValueError(
            f"general.architecture of {header.path} must be one of {tuple(ARCHITECTURES)}, "
            f"got {architecture!r}"
        )
    prefix = f"{architecture}."
    keys = {
        key.removeprefix(prefix): _same_in_all_layers(key, value)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    config_keys = _CONFIG_KEYS | (_EXPERT_KEYS if architecture == "qwen3moe" else {})
    required = [*_REQUIRED, *(key for key in _EXPERT_KEYS if key in config_keys)]
    missing = [prefix + key for key in required if key not in keys]
    if missing:
        raise ValueError(f"{header.path} must have the keys {missing} in its metadata, got none")
    return _hf_config(header, keys, config_keys)


def _same_in_all_layers(key: str, value: Any) -> Any:
    """Replaces a list of equal numbers, one per layer, by the number."""
    if key.endswith((".head_count", ".head_count_kv", ".feed_forward_length")):
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise NotImplementedError(f"{key} must be the same in all layers, got {value}")
            return value[0]
    return value


def _hf_config(
    header: GgufHeader, keys: Mapping[str, Any], config_keys: Mapping[str, str]
) -> dict[str, Any]:
    """Makes the `config.json` of the model; keys without a place in it are refused."""
    metadata, tensors = header.metadata, header.tensors
    read = {name: keys[key] for key, name in config_keys.items() if key in keys}
    # `ModelConfig` refuses 0 heads.
    usual_dim = read["hidden_size"] // max(1, read["num_attention_heads"])
    head_dim = read.setdefault("head_dim", usual_dim)
    read.setdefault("num_key_value_heads", read["num_attention_heads"])
    harmless = _HARMLESS | {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
    problems = [
        f"{metadata['general.architecture']}.{key}={keys[key]!r} (supported: {value!r} or absent)"
        for key, value in harmless.items()
        if key in keys and keys[key] != value
    ]
    if problems:
        raise NotImplementedError(
            f"{header.path} asks for what is not implemented:\n  " + "\n  ".join(problems)
        )
    # The embedding of a padded vocabulary has more rows than there are tokens.
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    tokens = len(metadata.get("tokenizer.ggml.tokens", ()))
    read |= {
        "model_type": ARCHITECTURES[metadata["general.architecture"]],
        "norm_topk_prob": True,  # llama.cpp always divides the weights of experts by their sum
        "vocab_size": rows or keys.get("vocab_size") or tokens or None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(metadata) or None,
        "dtype": _dtype(header),
        "rope_scaling": _rope_scaling(header, keys, read),
        # A window in the file applies to all layers.
        "use_sliding_window": True,
        "max_window_layers": 0,
        "sliding_window": read.get("sliding_window"),
    }
    # Other keys keep the file's names, so that `translate` names them when it refuses them.
    known = {*config_keys, *_ROPE_KEYS, *harmless, "rope.scaling.type", "vocab_size"}
    return {key.replace(".", "_"): value for key, value in keys.items() if key not in known} | read


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Lists the tokens that end a generation, as llama.cpp chooses them.

    The metadata of most files names one of them, but models end texts, turns and the files of a
    repository with different tokens. So tokens with well-known names count too, whatever their
    kind, except `</s>` if its kind is text: vocabularies of Qwen have this HTML tag as text.

    Args:
      metadata: Metadata of a header.

    Returns:
      Ids: first the metadata's, then the others in ascending order; tokens outside the vocabulary
        are skipped.

    Example:
      >>> tokens = ["a", "<|endoftext|>", "<|im_end|>"]
      >>> fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2}
      >>> end_token_ids(fields)
      [2, 1]
    """
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = _END_NAMES.union(*_FIM_NAMES.values())
    ids = {token: index for index, token in enumerate(tokens) if token in names}
    kinds = metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list) and "</s>" in ids and kinds[ids["</s>"] :][:1] == [_TEXT]:
        del ids["</s>"]
    given, named = [], [ids[name] for name in _END_NAMES.intersection(ids)]
    for field in _END_FIELDS:
        found = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if isinstance(found, int) and tokens and not 0 <= found < len(tokens):
            found = None
        if found is None:
            named += [ids[name] for name in _FIM_NAMES.get(field, ()) if name in ids][:1]
        else:
            given.append(found)
    # In vocabularies with an end-of-tool-call token, these two do not end a turn.
    left_out = []
    if ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}:
        left_out.append(ids.get("<|end|>"))
    if "<|tool_response>" in ids:
        left_out.append(ids.get("</s>"))
    return [x for x in dict.fromkeys(given + sorted(named)) if x not in left_out]


def _rope_scaling(
    header: GgufHeader, keys: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Makes the `rope_scaling` of the `config.json`."""
    rope_type = keys.get("rope.scaling.type", "none")
    if ROPE_FREQS in header.tensors:
        if rope_type != "none":
            raise NotImplementedError(
                f"{header.path} must have {ROPE_FREQS} or rope.scaling.type, got both "
                f"({rope_type!r})"
            )
        return _llama3_scaling(header, config)
    if rope_type == "none":
        return None
    parameters = {name: keys[key] for key, name in _ROPE_KEYS.items() if key in keys}
    return {"rope_type": rope_type} | parameters


def _llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Finds the `rope_scaling` that gives the frequencies in the file's tensor.

    The tensor holds the divisor of each frequency; the largest divisor is the factor.
    """
    tensor = header.tensors[ROPE_FREQS]
    theta, head_dim = config.get("rope_theta", 10000.0), config["head_dim"]
    if tensor.dtype != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{ROPE_FREQS} of {header.path} must be F32 of shape {(head_dim // 2,)}, got "
            f"{tensor.dtype} of shape {tensor.shape}"
        )
    divisors = np.fromfile(header.path, "<f4", head_dim // 2, offset=tensor.start)
    if (divisors == 1).all():
        return None
    plain, _ = rope_frequencies(RopeConfig(theta=theta), head_dim)
    scaling = _LLAMA3 | {"factor": float(divisors.max())}
    given, _ = rope_frequencies(RopeConfig(theta=theta, **scaling), head_dim)
    # llama.cpp and transformers round in different orders.
    if not np.allclose(plain / divisors, given, rtol=1e-5, atol=0):
        raise NotImplementedError(
            f"{ROPE_FREQS} of {header.path} must be the rescaling of Llama 3.1 ({_LLAMA3}), got "
            f"{divisors.tolist()}; use the safetensors version, whose config.json says what it is"
        )
    return scaling


def _dtype(header: GgufHeader) -> str:
    found = {tensor.dtype for tensor in header.tensors.values()}
    if found <= {"F32"}:
        return "float32"
    return "float16" if found <= {"F32", "F16"} else "bfloat16"
