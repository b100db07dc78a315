"""Where parameters go: one sharding for all, a tree of them, or a function that gives each."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from sketchwalk_jax.models.params import Params, flatten_params

ParamsSharding = (
    Sharding
    | Mapping[str, Any]
    | Callable[[tuple[str, ...], jax.ShapeDtypeStruct], Sharding]
    | None
)
"""What `load` accepts as `sharding`."""


def shardings_by_path(
    sharding: ParamsSharding, shapes: Params
) -> dict[tuple[str, ...], Sharding | None]:
    """Gives every parameter its sharding.

    Args:
        sharding: None for the default device, one sharding for all, a tree of shardings with the
            layout of the parameters, or a function ``(path, shape) -> sharding``.
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
