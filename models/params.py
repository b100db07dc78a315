"""Defines the parameter tree: shapes, random parameters, and shardings.

Parameters are a plain nested dict. The arrays of the layers are stacked on a leading L axis, so
that `jax.lax.scan` runs over them. Axes: V vocabulary, D model, L layers, N query heads, K key
and value heads, H head_dim, F mlp; E experts, each of width M::

    embed/embedding                 [V, D]
    layers/attn_norm/scale          [L, D]
    layers/query/kernel             [L, D, N, H]    bias [L, N, H]   with qkv_bias
    layers/key|value/kernel         [L, D, K, H]    bias [L, K, H]   with qkv_bias
    layers/out/kernel               [L, N, H, D]    bias [L, D]      with o_bias
    layers/query_norm|key_norm/scale [L, H]                          with qk_norm
    layers/mlp_norm/scale           [L, D]
    layers/gate|up/kernel           [L, D, F]       bias [L, F]      with mlp_bias
    layers/down/kernel              [L, F, D]       bias [L, D]      with mlp_bias
    layers/router/kernel            [L, D, E]                        with experts
    layers/expert_gate|expert_up/kernel [L, E, D, M]                 with experts
    layers/expert_down/kernel       [L, E, M, D]                     with experts
    final_norm/scale                [D]
    lm_head/kernel                  [D, V]                           unless tie_word_embeddings

Arrays of the mlp are stacked over `ModelConfig.mlp_layers` only, those of experts over
`ModelConfig.expert_layers`.

With 8-bit weights, two arrays replace each `kernel` in the layers except the router's. Outputs come
first, the layout of 8-bit matrix units; `W = quantized · scales`. Experts have their axis E after L
here too::

    layers/<name>/quantized         [L, outputs..., inputs...]       float8_e4m3fn or int8
    layers/<name>/scales            [L, outputs...]                  float32
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.validation import DTYPES, describe

Params = dict[str, Any]
"""A nested dict of arrays with the layout of this module."""

ParamsSharding = (
    Sharding
    | Mapping[str, Any]
    | Callable[[tuple[str, ...], jax.ShapeDtypeStruct], Sharding]
    | None
)
"""Argument `sharding` of `load`."""

QUANTIZED_DTYPES = {"float8": "float8_e4m3fn", "int8": "int8"}
"""Values of the argument `weights` of `load`, and the dtype of `quantized` for each."""
MLP = ("gate", "up", "down")
"""Names in `layers` that only layers with an ordinary mlp have."""
EXPERTS = ("router", "expert_gate", "expert_up", "expert_down")
"""Names in `layers` that only layers with experts have."""
QUANTIZED = ("quantized", "scales")
"""The arrays that replace a `kernel`."""


def check_weights(weights: str) -> None:
    """Raises a `ValueError` unless `weights` is a key of `QUANTIZED_DTYPES`."""
    if not isinstance(weights, str) or weights not in QUANTIZED_DTYPES:
        raise ValueError(f"weights must be one of {tuple(QUANTIZED_DTYPES)}, got {weights!r}")


def weights_of_dtypes(dtypes: Iterable[str]) -> str | None:
    """Tells how layers are quantised from the dtypes of their arrays `quantized`; None without any.

    `check_params` refuses other dtypes.

    Example:
      >>> weights_of_dtypes(["int8", "int8"]), weights_of_dtypes([])
      ('int8', None)
    """
    found = set(dtypes)
    if not found:
        return None
    return "int8" if QUANTIZED_DTYPES["int8"] in found else "float8"


def weights_of(params: Any) -> str | None:
    """Tells how the layers of a parameter tree are quantised; None if they are not.

    Example:
      >>> weights_of({"layers": {"gate": {"kernel": jnp.ones((2, 4, 8))}}}) is None
      True
    """
    layers = params.get("layers") if isinstance(params, Mapping) else None
    return weights_of_dtypes(
        str(getattr(leaf["quantized"], "dtype", None))
        for leaf in (layers.values() if isinstance(layers, Mapping) else ())
        if isinstance(leaf, Mapping) and "quantized" in leaf
    )


def param_shapes(
    model_config: ModelConfig, dtype: DTypeLike | None = None, *, weights: str | None = None
) -> Params:
    """Describes every parameter without allocating any.

    Args:
      model_config: Sizes and switches of the model.
      dtype: Dtype of the parameters; None takes the checkpoint's own.
      weights: `"float8"` or `"int8"` for quantised layers, as in `load`.

    Returns:
      The parameter tree with a `jax.ShapeDtypeStruct` for each array.

    Raises:
      ValueError: If `weights` is unknown.

    Example:
      >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512)
      >>> param_shapes(config)["layers"]["key"]["kernel"].shape
      (2, 32, 2, 8)
    """
    if weights is not None:
        check_weights(weights)
    c = model_config
    num_layers, width, mlp = c.num_layers, c.hidden_size, c.intermediate_size
    query, key = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)

    def linear(
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        has_bias: bool = False,
        stack: tuple[int, ...] = (num_layers,),
    ) -> Params:
        leaf: Params = {"kernel": (*stack, *inputs, *outputs)}
        if weights is not None:
            stored = jnp.dtype(QUANTIZED_DTYPES[weights])
            leaf = {
                "quantized": jax.ShapeDtypeStruct((*stack, *outputs, *inputs), stored),
                "scales": jax.ShapeDtypeStruct((*stack, *outputs), jnp.float32),
            }
        return leaf | {"bias": (*stack, *outputs)} if has_bias else leaf

    layers: Params = {
        "attn_norm": {"scale": (num_layers, width)},
        "query": linear((width,), query, c.qkv_bias),
        "key": linear((width,), key, c.qkv_bias),
        "value": linear((width,), key, c.qkv_bias),
        "out": linear(query, (width,), c.o_bias),
        "mlp_norm": {"scale": (num_layers, width)},
    }
    if c.mlp_layers:
        dense = (len(c.mlp_layers),)
        layers |= {
            "gate": linear((width,), (mlp,), c.mlp_bias, dense),
            "up": linear((width,), (mlp,), c.mlp_bias, dense),
            "down": linear((mlp,), (width,), c.mlp_bias, dense),
        }
    if c.expert_layers:
        stack, own = (len(c.expert_layers), c.num_experts), c.expert_intermediate_size
        layers |= {
            "router": {"kernel": (stack[0], width, c.num_experts)},
            "expert_gate": linear((width,), (own,), stack=stack),
            "expert_up": linear((width,), (own,), stack=stack),
            "expert_down": linear((own,), (width,), stack=stack),
        }
    if c.qk_norm:
        layers["query_norm"] = {"scale": (num_layers, c.head_dim)}
        layers["key_norm"] = {"scale": (num_layers, c.head_dim)}
    shapes: Params = {
        "embed": {"embedding": (c.vocab_size, width)},
        "layers": layers,
        "final_norm": {"scale": (width,)},
    }
    if not c.tie_word_embeddings:
        shapes["lm_head"] = {"kernel": (width, c.vocab_size)}
    dtype = jnp.dtype(c.dtype if dtype is None else dtype)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype) if isinstance(shape, tuple) else shape,
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def init_params(
    key: PRNGKeyArray,
    model_config: ModelConfig,
    dtype: DTypeLike | None = None,
    *,
    sharding: ParamsSharding = None,
) -> Params:
    """Draws random parameters: kernels and embedding normal, norms 1, biases 0.

    Kernels have standard deviation `1 / sqrt(inputs)`, the embedding `1 / sqrt(D)`, so that a
    random model has logits of order one.

    Args:
      key: Random key.
      model_config: Sizes and switches of the model.
      dtype: Dtype of the parameters; None takes the checkpoint's own.
      sharding: Placement of the parameters, as in `load`. Each device then draws only its own
        shards, a layer at a time, so the model need not fit onto one device. The values differ from
        those without a sharding, but are the same for every sharding.

    Returns:
      The parameter tree.

    Example:
      >>> config = ModelConfig(model_type="qwen3", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
      ...                      max_position_embeddings=512, qk_norm=True)
      >>> init_params(jax.random.key(0), config)["layers"]["query_norm"]["scale"].shape
      (2, 16)
    """
    tree = param_shapes(model_config, dtype)
    shapes, shardings = flatten_params(tree), shardings_by_path(sharding, tree)

    drawn = {}
    keys = jax.random.split(key, len(shapes))
    for (path, shape), leaf_key in zip(shapes.items(), keys, strict=True):
        where = shardings[path]
        if where is None:
            drawn[path] = _draw(path, shape, leaf_key)
        else:
            draw = functools.partial(_draw_by_layer, path, shape)
            drawn[path] = jax.jit(draw, out_shardings=where)(leaf_key)
    return unflatten_params(drawn)


def _draw(path: tuple[str, ...], shape: jax.ShapeDtypeStruct, key: PRNGKeyArray) -> jax.Array:
    """Draws one random parameter."""
    if path[-1] == "scale":
        return jnp.ones(shape.shape, shape.dtype)
    if path[-1] == "bias":
        return jnp.zeros(shape.shape, shape.dtype)
    inputs = shape.shape[-1:] if path[-1] == "embedding" else input_axes(path, shape.shape)
    normal = jax.random.normal(key, shape.shape, jnp.float32)
    return (normal / math.sqrt(math.prod(inputs))).astype(shape.dtype)


def _draw_by_layer(
    path: tuple[str, ...], shape: jax.ShapeDtypeStruct, key: PRNGKeyArray
) -> jax.Array:
    """Draws one random parameter by layer: a draw takes several times the memory of its result."""
    if path[0] != "layers":
        return _draw(path, shape, key)
    one = jax.ShapeDtypeStruct((1, *shape.shape[1:]), shape.dtype)
    draw = functools.partial(_draw, path, one)
    return jax.lax.map(draw, jax.random.split(key, shape.shape[0])).reshape(shape.shape)


def input_axes(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a kernel's input axes: `(N, H)` for out, one axis for the others.

    Example:
      >>> input_axes(("layers", "out", "kernel"), (2, 4, 8, 32))
      (4, 8)
    """
    first = num_stack_axes(path)
    num_inputs = 2 if path[-2] == "out" else 1
    return shape[first : first + num_inputs]


def num_active(model_config: ModelConfig) -> int:
    """Counts the parameters that compute one token: of experts, only those that it chooses.

    Example:
      >>> config = ModelConfig(model_type="qwen3_moe", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512, num_experts=8, experts_per_token=2,
      ...                      expert_intermediate_size=16)
      >>> leaves = flatten_params(param_shapes(config)).values()
      >>> sum(leaf.size for leaf in leaves) - num_active(config) == 2 * (8 - 2) * 3 * 16 * 32
      True
    """
    chosen, count = model_config.experts_per_token, model_config.num_experts
    return sum(
        leaf.size // count * chosen if num_stack_axes(path) == 2 else leaf.size
        for path, leaf in flatten_params(param_shapes(model_config)).items()
    )


def own_layers(model_config: ModelConfig, name: str) -> tuple[int, ...]:
    """Returns the layers over which the arrays of a name in `layers` are stacked.

    Example:
      >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512)
      >>> own_layers(config, "gate")
      (0, 1)
    """
    if name in EXPERTS:
        return model_config.expert_layers
    return model_config.mlp_layers if name in MLP else tuple(range(model_config.num_layers))


def num_stack_axes(path: tuple[str, ...]) -> int:
    """Counts a parameter's leading axes: one for layers, and one more for experts.

    Example:
      >>> [num_stack_axes(("layers", name, "kernel")) for name in ("gate", "expert_gate")]
      [1, 2]
    """
    if path[0] != "layers":
        return 0
    return 2 if path[1] in EXPERTS[1:] else 1


def flatten_params(params: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Turns a nested dict into a flat one whose keys are paths.

    Example:
      >>> flatten_params({"embed": {"embedding": 1}})
      {('embed', 'embedding'): 1}
    """
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= {(name, *path): leaf for path, leaf in flatten_params(value).items()}
        else:
            flat[(name,)] = value
    return flat


def unflatten_params(flat: Mapping[tuple[str, ...], Any]) -> Params:
    """Turns a flat dict whose keys are paths into a nested one.

    Example:
      >>> unflatten_params({("embed", "embedding"): 1})
      {'embed': {'embedding': 1}}
    """
    params: Params = {}
    for path, leaf in flat.items():
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return params


def shardings_by_path(
    sharding: ParamsSharding, shapes: Params
) -> dict[tuple[str, ...], Sharding | None]:
    """Gives every parameter its sharding.

    Args:
      sharding: None for the default device, one sharding for all, a tree of shardings with the
        layout of the parameters, or a function `(path, shape) -> sharding`.
      shapes: The parameter tree from `sketchwalk_jax.models.param_shapes`.

    Returns:
      The sharding of each parameter by its path; None means the default device.

    Raises:
      ValueError: If a tree does not have the layout of the parameters, or something in it is
        not a sharding.

    Example:
      >>> shapes = {"final_norm": {"scale": jax.ShapeDtypeStruct((8,), "float32")}}
      >>> shardings_by_path(None, shapes)
      {('final_norm', 'scale'): None}
    """
    leaves = flatten_params(shapes)
    if sharding is None or isinstance(sharding, Sharding):
        return dict.fromkeys(leaves, sharding)
    if isinstance(sharding, Mapping):
        found = flatten_params(sharding)
    else:
        found = {path: sharding(path, shape) for path, shape in leaves.items()}
    if found.keys() != leaves.keys():
        missing = ["/".join(path) for path in leaves if path not in found]
        unknown = ["/".join(path) for path in found if path not in leaves]
        raise ValueError(
            f"sharding must have the layout of the parameters, got missing {missing} and "
            f"unknown {unknown}"
        )
    wrong = {path: leaf for path, leaf in found.items() if not isinstance(leaf, Sharding)}
    if wrong:
        path, leaf = next(iter(wrong.items()))
        raise ValueError(
            f"sharding must hold jax.sharding.Sharding, got {leaf!r} for {'/'.join(path)}"
        )
    return found


def check_params(params: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Compares a parameter tree with what a model needs, array by array.

    Args:
      params: A nested dict of arrays.
      model_config: The model.

    Raises:
      ValueError: If arrays are missing, unknown, of another shape or not floating point; all of
        them in one message.
    """
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params must fit model_config: a nested dict of arrays is needed, got "
            f"{type(params).__name__}"
        )
    found = flatten_params(params)
    expected = flatten_params(param_shapes(model_config, weights=weights_of(params)))
    problems = [f"{'/'.join(path)} is missing" for path in expected if path not in found]
    wrong_layers = set[int]()
    for path, leaf in found.items():
        name = "/".join(map(str, path))
        if path not in expected:
            problems.append(f"{name} is unknown")
            continue
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            problems.append(f"{name} must be an array, got {type(leaf).__name__}")
            continue
        shape, wanted = tuple(leaf.shape), expected[path]
        if shape != wanted.shape:
            problems.append(f"{name} must be {wanted.shape}, got {shape}")
            if path[0] == "layers" and shape[1:] == wanted.shape[1:]:
                wrong_layers.add(shape[0])
        kinds = (wanted.dtype.name,) if path[-1] in QUANTIZED else DTYPES
        if leaf.dtype.name not in kinds:
            accepted = kinds[0] if len(kinds) == 1 else f"one of {kinds}"
            problems.append(f"{name} must be {accepted}, got {leaf.dtype}")
    if len(wrong_layers) == 1:
        problems.insert(
            0,
            f"num_layers is {model_config.num_layers}, the arrays have {wrong_layers.pop()} "
            f"layers; take the configuration that load returned with them",
        )
    if problems:
        raise ValueError("params must fit model_config:\n  " + "\n  ".join(problems))


def check_runs(params: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Runs `check_params`, and checks that the layers compute in the embedding's dtype."""
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a parameter tree from load, got {describe(params)}")
    leaves, structure = jax.tree.flatten(params)
    try:
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    except AttributeError:  # leaves that are not arrays
        check_params(params, model_config)
        raise
    _check_kinds(structure, kinds, model_config)


@functools.lru_cache(maxsize=64)
def _check_kinds(
    structure: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...], model_config: ModelConfig
) -> None:
    """Runs `check_runs` on shapes and dtypes, cached so that decode steps take no time for it."""
    params = structure.unflatten([jax.ShapeDtypeStruct(*kind) for kind in kinds])
    check_params(params, model_config)
    dtype = params["embed"]["embedding"].dtype
    others = {
        "/".join(path): leaf.dtype
        for path, leaf in flatten_params(params["layers"]).items()
        if leaf.dtype != dtype and path[-1] not in QUANTIZED
    }
    if others:
        name, other = next(iter(others.items()))
        raise ValueError(
            f"params must have layers of the embedding's dtype {dtype}, got {other} for "
            f"layers/{name} and {len(others) - 1} others; load(..., dtype=...) makes all alike"
        )
