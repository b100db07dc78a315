"""The parameter tree: shapes, random parameters, and where they go.

Parameters are a plain nested dict. The arrays of the layers are stacked on a leading L axis, so
that `jax.lax.scan` runs over them. Axes: V vocabulary, D model, L layers, N query heads, K key
and value heads, H head_dim, F mlp::

    embed/embedding                 [V, D]
    layers/attn_norm/scale          [L, D]
    layers/query/kernel             [L, D, N, H]    bias [L, N, H]   with qkv_bias
    layers/key|value/kernel         [L, D, K, H]    bias [L, K, H]   with qkv_bias
    layers/out/kernel               [L, N, H, D]    bias [L, D]      with o_bias
    layers/query_norm|key_norm/scale [L, H]                          with qk_norm
    layers/mlp_norm/scale           [L, D]
    layers/gate|up/kernel           [L, D, F]       bias [L, F]      with mlp_bias
    layers/down/kernel              [L, F, D]       bias [L, D]      with mlp_bias
    final_norm/scale                [D]
    lm_head/kernel                  [D, V]                           unless tie_word_embeddings
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hf_config import DTYPES

Params = dict[str, Any]
"""A nested dict of arrays with the layout of this module."""

ParamsSharding = (
    Sharding
    | Mapping[str, Any]
    | Callable[[tuple[str, ...], jax.ShapeDtypeStruct], Sharding]
    | None
)
"""What `load` accepts as `sharding`."""


def param_shapes(model_config: ModelConfig, dtype: DTypeLike | None = None) -> Params:
    """Describes every parameter without allocating any.

    Args:
      model_config: Sizes and switches of the model.
      dtype: Dtype of the parameters; None takes the checkpoint's own.

    Returns:
      The parameter tree with a `jax.ShapeDtypeStruct` for each array.

    Example:
      >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512)
      >>> param_shapes(config)["layers"]["key"]["kernel"].shape
      (2, 32, 2, 8)
    """
    c = model_config
    num_layers, width, mlp = c.num_layers, c.hidden_size, c.intermediate_size
    query, key = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)

    def linear(inputs: tuple[int, ...], outputs: tuple[int, ...], has_bias: bool) -> Params:
        leaf = {"kernel": (num_layers, *inputs, *outputs)}
        return leaf | {"bias": (num_layers, *outputs)} if has_bias else leaf

    layers: Params = {
        "attn_norm": {"scale": (num_layers, width)},
        "query": linear((width,), query, c.qkv_bias),
        "key": linear((width,), key, c.qkv_bias),
        "value": linear((width,), key, c.qkv_bias),
        "out": linear(query, (width,), c.o_bias),
        "mlp_norm": {"scale": (num_layers, width)},
        "gate": linear((width,), (mlp,), c.mlp_bias),
        "up": linear((width,), (mlp,), c.mlp_bias),
        "down": linear((mlp,), (width,), c.mlp_bias),
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
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def init_params(
    key: PRNGKeyArray, model_config: ModelConfig, dtype: DTypeLike | None = None
) -> Params:
    """Draws random parameters: kernels and embedding normal, norms 1, biases 0.

    Kernels have standard deviation `1 / sqrt(inputs)`, the embedding `1 / sqrt(D)`, so that a
    random model has logits of order one.

    Args:
      key: Random key.
      model_config: Sizes and switches of the model.
      dtype: Dtype of the parameters; None takes the checkpoint's own.

    Returns:
      The parameter tree.

    Example:
      >>> config = ModelConfig(model_type="qwen3", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
      ...                      max_position_embeddings=512, qk_norm=True)
      >>> init_params(jax.random.key(0), config)["layers"]["query_norm"]["scale"].shape
      (2, 16)
    """
    shapes = flatten_params(param_shapes(model_config, dtype))
    drawn = {}
    for (path, shape), leaf_key in zip(
        shapes.items(), jax.random.split(key, len(shapes)), strict=True
    ):
        if path[-1] == "scale":
            drawn[path] = jnp.ones(shape.shape, shape.dtype)
        elif path[-1] == "bias":
            drawn[path] = jnp.zeros(shape.shape, shape.dtype)
        else:
            inputs = shape.shape[-1:] if path[-1] == "embedding" else input_axes(path, shape.shape)
            normal = jax.random.normal(leaf_key, shape.shape, jnp.float32)
            drawn[path] = (normal / math.sqrt(math.prod(inputs))).astype(shape.dtype)
    return unflatten_params(drawn)


def input_axes(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a kernel's input axes: `(N, H)` for out, one axis for the others.

    Example:
      >>> input_axes(("layers", "out", "kernel"), (2, 4, 8, 32))
      (4, 8)
    """
    layer_axes = 1 if path[0] == "layers" else 0
    num_inputs = 2 if path[-2] == "out" else 1
    return shape[layer_axes : layer_axes + num_inputs]


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
    expected = flatten_params(param_shapes(model_config))
    found = flatten_params(params)
    problems = [f"{'/'.join(path)} is missing" for path in expected if path not in found]
    problems += [f"{'/'.join(path)} is unknown" for path in found if path not in expected]
    problems += [
        f"{'/'.join(path)} must be {leaf.shape}, got {np.shape(found[path])}"
        for path, leaf in expected.items()
        if path in found and np.shape(found[path]) != leaf.shape
    ]
    problems += [
        f"{'/'.join(path)} must be one of {DTYPES}, got {leaf.dtype}"
        for path, leaf in found.items()
        if jnp.dtype(leaf.dtype).name not in DTYPES
    ]
    if problems:
        raise ValueError("params must fit model_config:\n  " + "\n  ".join(problems))
