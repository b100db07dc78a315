"""A Llama-shaped model around the reference attention, one sequence at a time, in NumPy."""

import dataclasses

import numpy as np
import oracle
import reference


@dataclasses.dataclass
class ReferenceModel:
    """Keeps queries, keys and values of all tokens; `prefill` and `decode` may alternate.

    Attributes:
      params: Parameter tree.
      model_config: Sizes; default rotary embedding, no biases.
      config: A `SketchWalkConfig`.
      phase: Phase in which selection is sparse.
      history: Queries, keys and values of each layer so far.
      masks: Attended pairs of each call and layer.
    """

    params: dict
    model_config: object
    config: object
    phase: str = "both"
    history: list = dataclasses.field(default_factory=list)
    masks: list = dataclasses.field(default_factory=list)

    def prefill(self, tokens) -> tuple[np.ndarray, list[reference.ReferenceLayer]]:
        """Appends prompt tokens; returns logits of all of them, and every layer's results."""
        return self._run(np.asarray(tokens), "prefill")

    def decode(self, token) -> tuple[np.ndarray, list[reference.ReferenceLayer]]:
        """Appends one token; returns the logits after it `[V]`, and every layer's results."""
        logits, layers = self._run(np.asarray([token]), "decode")
        return logits[0], layers

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.history[0][0]) if self.history else 0

    def densities(self) -> list[float]:
        """Returns attended over causal pairs of each layer, over all calls."""
        layers = zip(*self.masks, strict=True)
        causal = self.num_tokens * (self.num_tokens + 1) / 2
        return [sum(int(mask.sum()) for mask in masks) / causal for masks in layers]

    def _run(self, tokens, phase):
        model, config = self.model_config, self.config
        start, state, layers = self.num_tokens, None, []
        angles = start + np.arange(len(tokens))
        hidden = np.asarray(self.params["embed"]["embedding"])[tokens]
        if not self.history:
            empty = [np.zeros((0, n, model.head_dim), np.float32) for n in self._heads()]
            self.history = [empty] * model.num_layers
        for index in range(model.num_layers):
            weights = {
                name: np.asarray(leaf[index])
                for group, leaves in self.params["layers"].items()
                for kind, leaf in leaves.items()
                for name in [f"{group}_{kind}"]
            }
            x = self._norm(hidden, weights["attn_norm_scale"])
            query, key, value = (
                np.einsum("td,dnh->tnh", x, weights[f"{name}_kernel"])
                for name in ("query", "key", "value")
            )
            new = self._rotate(query, angles), self._rotate(key, angles), value
            self.history[index] = [
                np.concatenate(pair) for pair in zip(self.history[index], new, strict=True)
            ]
            is_dense = config.is_dense(index) or self.phase not in ("both", phase)
            where = {"is_token": phase == "decode", "is_dense": is_dense}
            layer = reference.run_layer(*self.history[index], state, config, **where)
            state = state if is_dense else layer.walk
            first = start if phase == "prefill" else 0
            layers.append(dataclasses.replace(layer, mask=layer.mask[first:]))
            output = np.asarray(layer.output)[first:]
            hidden = hidden + np.einsum("tnh,nhd->td", output, weights["out_kernel"])
            x = self._norm(hidden, weights["mlp_norm_scale"])
            gate = x @ weights["gate_kernel"]
            inner = gate / (1.0 + np.exp(-gate)) * (x @ weights["up_kernel"])
            hidden = hidden + inner @ weights["down_kernel"]
        self.masks.append([layer.mask for layer in layers])
        hidden = self._norm(hidden, np.asarray(self.params["final_norm"]["scale"]))
        return hidden @ np.asarray(self.params["lm_head"]["kernel"]), layers

    def _heads(self) -> tuple[int, int, int]:
        model = self.model_config
        return model.num_heads, model.num_kv_heads, model.num_kv_heads

    def _norm(self, x, scale):
        return (
            x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.model_config.rms_norm_eps) * scale
        )

    def _rotate(self, x, positions):
        half = x.shape[-1] // 2
        frequencies = self.model_config.rope.theta ** (-np.arange(half) / half)
        # Round frequencies, then angles, to float32, as every implementation of Llama does.
        angles = np.float32(positions[:, None]) * np.float32(frequencies)
        angles = angles[:, None]
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def has_near_ties(layers: list[reference.ReferenceLayer], config) -> bool:
    """Says whether rounding could change the layers' selections."""
    sparse = [layer for layer in layers if layer.scores is not None]
    if not sparse:
        return False
    num_blocks = len(sparse[0].scores)
    rows = [num_blocks - 1] if len(sparse[0].rows) == 1 else None
    counts = reference.budget(config, num_blocks)
    return oracle.has_near_ties([layer.scores for layer in sparse], config, counts, rows=rows)
