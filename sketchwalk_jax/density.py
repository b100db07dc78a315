"""Measured density: attended causal pairs over all causal pairs, dense layers included."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Density:
    """Counts of (query, key) pairs, per phase, layer and sequence; all float32.

    Attributes:
      prefill_pairs: Pairs attended to while reading prompts, `[L, B]` (mean over heads).
      prefill_causal: All causal pairs of the prompts, `[B]`.
      decode_pairs: Pairs attended to while decoding, `[L, B]`.
      decode_causal: All causal pairs of the decoded tokens, `[B]`.
    """

    prefill_pairs: Float[Array, "L B"]
    prefill_causal: Float[Array, "B"]
    decode_pairs: Float[Array, "L B"]
    decode_causal: Float[Array, "B"]

    @classmethod
    def zeros(cls, num_layers: int, batch: int) -> "Density":
        """No pairs yet."""
        # Four buffers of their own: the cache that holds them is donated.
        shapes = ((num_layers, batch), (batch,), (num_layers, batch), (batch,))
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def add(self, phase: str, pairs: Float[Array, "L B"], causal: Float[Array, "B"]) -> "Density":
        """With the pairs of one call added to `phase`, `"prefill"` or `"decode"`."""
        old = getattr(self, f"{phase}_pairs"), getattr(self, f"{phase}_causal")
        new = {f"{phase}_pairs": old[0] + pairs, f"{phase}_causal": old[1] + causal}
        return dataclasses.replace(self, **new)

    @property
    def prefill(self) -> Float[Array, "L"]:
        """Density of each layer over the prompts (NaN if none was read)."""
        return jnp.sum(self.prefill_pairs, axis=1) / jnp.sum(self.prefill_causal)

    @property
    def decode(self) -> Float[Array, "L"]:
        """Density of each layer over the decoded tokens (NaN if there are none)."""
        return jnp.sum(self.decode_pairs, axis=1) / jnp.sum(self.decode_causal)

    @property
    def overall(self) -> Float[Array, ""]:
        """Density over both phases, all layers and sequences."""
        pairs = jnp.sum(self.prefill_pairs) + jnp.sum(self.decode_pairs)
        causal = jnp.sum(self.prefill_causal) + jnp.sum(self.decode_causal)
        return pairs / (causal * float(self.prefill_pairs.shape[0]))
