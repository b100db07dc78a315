"""Translates a Hugging Face `config.json` into the fields of `ModelConfig`.

The raw JSON is read instead of `AutoConfig`, because transformers 5 renames attributes on loading
and files of all years must load. The reference is the computation of transformers' class of that
`model_type` from the same file:

* Attributes that the class reads are translated. Absent ones take its defaults.
* Attributes that change the computation in an unimplemented way raise one NotImplementedError that
  lists them. This includes attributes of related architectures (multipliers, soft caps, experts,
  ...), even if transformers ignores them: a file that sets them was not meant for the plain model.
  `RESULT_CHANGING` lists them.
* All other attributes do not change results and are ignored: dropout, initialisation, training and
  export leftovers, keys invented later.
"""

from collections.abc import Mapping
from typing import Any

from sketchwalk_jax.models.family import (
    MAX_LAYERS,
    Family,
    read_flag,
    read_integer,
    read_number,
    read_object,
)
from sketchwalk_jax.models.llama import LLAMA
from sketchwalk_jax.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from sketchwalk_jax.models.rope import ROPE_TYPES, RopeConfig
from sketchwalk_jax.validation import DTYPES, check_choice

FAMILIES: dict[str, Family] = {x.model_type: x for x in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
"""All supported families; to add one, write its record and list it here."""

_BY_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("attention_chunk_size attention_multiplier clip_qkv no_rope_layer per_layer_config", ()),
    ("rotary_dim", ()),
    ("attention_sink alibi bidirectional cross_attention is_encoder_decoder mrope", (False,)),
    ("parallel_residual qk_layernorm qk_norm quantiz rope_interleaved", (False,)),
    ("expert moe", (0, False)),
    ("is_causal", (True,)),
    ("logit_scal logits_scal multiplier partial_rotary_factor residual_scal", (1,)),
    ("rotary_pct scale_depth", (1,)),
    ("scale_emb", (False, 1)),
    ("softcap", (0,)),
)
RESULT_CHANGING = {part: values for parts, values in _BY_NEUTRAL_VALUES for part in parts.split()}
"""Parts of the names of attributes that change the computation, with their neutral values.

The first part that occurs in a name decides. None and empty containers are always neutral.
"""

REQUIRED = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
}


def translate(
    raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Translates a parsed `config.json` into keyword arguments of `ModelConfig`.

    Args:
      raw: The parsed `config.json`.
      generation_config: The parsed `generation_config.json`, for its end tokens only.

    Returns:
      One value for each field of `ModelConfig`.

    Raises:
      ValueError: If the model type is not supported or attributes are missing.
      NotImplementedError: If attributes need unimplemented features.

    Example:
      >>> raw = dict(model_type="llama", vocab_size=8, hidden_size=8, intermediate_size=8,
      ...            num_hidden_layers=1, num_attention_heads=2)
      >>> translate(raw)["head_dim"]
      4
    """
    model_type = raw.get("model_type")
    check_choice("model_type", model_type, tuple(FAMILIES))
    family = FAMILIES[str(model_type)]
    missing = [key for key in REQUIRED.values() if raw.get(key) is None]
    if missing:
        raise ValueError(f"config.json must have {', '.join(REQUIRED.values())}; missing {missing}")

    fields: dict[str, Any] = {name: read_integer(raw, key) for name, key in REQUIRED.items()}
    if fields["num_layers"] > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {MAX_LAYERS}, got {fields['num_layers']}; correct "
            f"config.json"
        )
    fields |= family.read_fields(raw)
    fields |= {
        "model_type": model_type,
        "rms_norm_eps": read_number(raw, "rms_norm_eps", 1e-6),
        "rope": rope_config(raw, fields["max_position_embeddings"]),
        "tie_word_embeddings": read_flag(raw, "tie_word_embeddings"),
        "eos_token_ids": eos_token_ids(raw, generation_config),
        "dtype": checkpoint_dtype(raw) or "float32",
    }
    problems = _unsupported_attributes(raw, family)
    context = fields["rope"].stretched_context(fields["max_position_embeddings"])
    problems += _sliding_layers(raw, family, fields["num_layers"], context=context)
    if problems:
        raise NotImplementedError(
            "config.json asks for what is not implemented:\n  " + "\n  ".join(problems)
        )
    return fields


def eos_token_ids(
    raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Returns the end tokens, the generation config's first; files give an int or a list.

    The value -1 means no token.

    Example:
      >>> eos_token_ids({"eos_token_id": 2}, {"eos_token_id": [7, 8]})
      (7, 8)
    """
    for source in (generation_config or {}, raw):
        value = source.get("eos_token_id")
        if value is not None:
            found = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
                raise ValueError(
                    f"eos_token_id must be a token id or a list of them, got {value!r}; correct "
                    f"generation_config.json or config.json"
                )
            return tuple(one for one in found if one != -1)
    return ()


def checkpoint_dtype(raw: Mapping[str, Any]) -> str | None:
    """Returns the dtype that `config.json` declares, or None.

    Raises:
      NotImplementedError: If it is not float32, float16 or bfloat16.

    Example:
      >>> checkpoint_dtype({"torch_dtype": "bfloat16"})
      'bfloat16'
    """
    declared = raw.get("dtype") or raw.get("torch_dtype")
    if declared is None or declared == "auto":
        return None
    dtype = str(declared).removeprefix("torch.")
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype {declared!r} is not supported; supported are {DTYPES}")
    return dtype


def rope_config(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Reads the rotary embedding in all spellings of `config.json`.

    Files up to 2025 have `rope_theta` and perhaps `rope_scaling` with `type` or `rope_type`;
    transformers 5 writes all of it into `rope_parameters`. If both are given, `rope_scaling` takes
    precedence, and an inner `rope_theta` over an outer one.

    Args:
      raw: The parsed `config.json`.
      max_position_embeddings: Replaces a missing original context, in tokens.

    Returns:
      The rotary embedding.

    Raises:
      ValueError: If a parameter is missing or invalid.
      NotImplementedError: If the type is not default, linear, llama3 or yarn.

    Example:
      >>> rope_config({"rope_theta": 1e6}, 4096).theta
      1000000.0
    """
    parameters = _rope_parameters(raw)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise NotImplementedError(
            f"a rotary embedding for each kind of layer ({sorted(parameters)}) is not supported; "
            f"supported is one for all layers"
        )
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise NotImplementedError(
            f"rope_type {rope_type!r} is not supported; supported are {ROPE_TYPES}"
        )
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
    }.get(rope_type, ())
    # A yarn without a factor takes it from the contexts if the file says null.
    given = {name for name, value in parameters.items() if value is not None or rope_type == "yarn"}
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(
            f"rope_type {rope_type!r} must have {', '.join(needed)}; missing {missing}"
        )

    theta = read_number(raw, "rope_theta", 10000.0, above=1.0)
    theta = read_number(parameters, "rope_theta", theta, above=1.0)
    fields: dict[str, Any] = {name: read_number(parameters, name, above=0.0) for name in needed}
    if rope_type in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = read_integer(parameters, name, max_position_embeddings)
        original = read_integer(raw, name, original)
        fields["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        if fields["factor"] is None:
            fields["factor"] = max_position_embeddings / original
        fields |= {
            "attention_factor": read_number(parameters, "attention_factor"),
            # 0 means the default, as in transformers.
            "beta_fast": read_number(parameters, "beta_fast") or 32.0,
            "beta_slow": read_number(parameters, "beta_slow") or 1.0,
            "mscale": read_number(parameters, "mscale"),
            "mscale_all_dim": read_number(parameters, "mscale_all_dim"),
            "truncate": read_flag(parameters, "truncate", True),
        }
    return RopeConfig(rope_type=rope_type, theta=theta, **fields)


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return read_object(raw, "rope_scaling") or read_object(raw, "rope_parameters")


def _unsupported_attributes(raw: Mapping[str, Any], family: Family) -> list[str]:
    problems = []
    # "swish" is torch's other name of silu.
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act={raw['hidden_act']!r} (supported: 'silu')")
    parameters = _rope_parameters(raw)
    nested = {key: parameters[key] for key in ("partial_rotary_factor",) if key in parameters}
    for name, value in (*raw.items(), *nested.items()):
        part = next((part for part in RESULT_CHANGING if part in name), None)
        if part is None or name in family.own_attributes or value is None or value in ([], {}, ""):
            continue
        harmless = RESULT_CHANGING[part]
        # True == 1 in Python, but `use_mrope: true` is a switch, not a factor of one.
        if not any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in harmless
        ):
            supported = " or ".join(repr(other) for other in harmless) or "absent"
            problems.append(f"{name}={value!r} (supported: {supported})")
    return problems


def _sliding_layers(
    raw: Mapping[str, Any], family: Family, num_layers: int, *, context: int
) -> list[str]:
    """Lists layers that do not attend to the whole context, by transformers' attributes."""
    window, first = family.read_window(raw)
    layer_types = raw.get("layer_types")
    is_list = isinstance(layer_types, list | tuple)
    if layer_types is not None and not (
        is_list and all(isinstance(kind, str) for kind in layer_types)
    ):
        raise ValueError(
            f"layer_types must be a list of names, got {str(layer_types)[:80]!r}; correct "
            f"config.json"
        )
    if layer_types is None:
        layer_types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    if len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types must name num_hidden_layers = {num_layers} layers, got {len(layer_types)}"
        )
    # "attention" is an older name of full attention.
    others = {
        kind: [layer for layer, other in enumerate(layer_types) if other == kind]
        for kind in sorted(set(layer_types) - {"full_attention", "attention"})
    }
    if window is not None and window >= context:
        others.pop("sliding_attention", None)
    return [
        f"{kind} (window {window}) in layers {layers} (supported: full_attention in every layer, "
        f"or a window of at least the context of {context} tokens)"
        for kind, layers in others.items()
    ]
