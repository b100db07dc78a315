"""What makes a model family: one record, which `llama.py` and `qwen.py` fill in.

One transformer serves all families. They differ by the names of their weights and by what their
`config.json` means, and that is all a family says. README.md beside this file has an example.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

RawConfig = Mapping[str, Any]
"""A parsed `config.json`."""

LAYER = "model.layers.{layer}."
"""What the names of a layer's weights begin with; `{layer}` counts the layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family of Hugging Face checkpoints.

    What an absent attribute of `config.json` means is what transformers' class of that
    `model_type` takes it to mean.

    Attributes:
      model_type: The `model_type` of its `config.json`.
      keys: Hugging Face name of each parameter by its path in the tree of `models.params`;
        parameters that a model does not have may be named.
      read_fields: The fields of `ModelConfig` that the family reads in its own way, from a
        parsed `config.json`: heads, head_dim, context, biases, norms, begin token.
      read_window: The sliding window that the file asks for, in tokens, or None; and the first
        layer to which it applies, where no `layer_types` say so.
    """

    model_type: str
    keys: Mapping[tuple[str, ...], str]
    read_fields: Callable[[RawConfig], dict[str, Any]]
    read_window: Callable[[RawConfig], tuple[int | None, int]]
