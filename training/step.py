"""Makes one training step: the model with differentiable dense attention, loss, update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt
from sequences import NUM_CLASSES, TEXT

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.models.transformer import embed, run_layers, unembed


class State(NamedTuple):
    """Everything that a step changes; parameters in float32."""

    params: Params
    optimizer: optax.OptState
    step: Int[Array, ""]


class Metrics(NamedTuple):
    """Sums over one batch by class of target: loss, right guesses, targets; float32."""

    loss: Float[Array, "C"]
    right: Float[Array, "C"]
    count: Float[Array, "C"]


def logits_of(params: Params, tokens: Int[Array, "B T"], *, model_config: ModelConfig) -> Array:
    """Computes float32 logits `[B, T, V]` with the layers of inference and cacheless attention.

    Attention is `jax.nn.dot_product_attention`, cuDNN's on an NVIDIA GPU.
    """

    def attend(query: Array, key: Array, value: Array, layer: Array, state: None) -> Any:
        del layer
        has_cudnn = jax.default_backend() == "gpu" and query.dtype != jnp.float32
        out = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="cudnn" if has_cudnn else None
        )
        return out, state, None

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _, _ = run_layers(
        params,
        embed(params, tokens),
        positions,
        None,
        model_config=model_config,
        layers=[(range(model_config.num_layers), attend)],
    )
    return unembed(params, hidden, model_config=model_config)


def sum_metrics(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], classes: UInt[Array, "B T"]
) -> Metrics:
    """Sums cross-entropy (nats) and right guesses for each class of target."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = jnp.argmax(logits, axis=-1) == targets
    is_class = jax.nn.one_hot(classes, NUM_CLASSES, dtype=jnp.float32)
    loss, right, count = (
        jnp.einsum("bt,btc->c", x.astype(jnp.float32), is_class)
        for x in (loss, right, jnp.ones_like(loss))
    )
    return Metrics(loss, right, count)


def _objective(metrics: Metrics) -> Float[Array, ""]:
    """Adds the mean loss of the text and the mean loss of the answers, with equal weight."""
    text = metrics.loss[TEXT] / jnp.maximum(metrics.count[TEXT], 1.0)
    answers = jnp.sum(metrics.loss[TEXT + 1 :])
    return text + answers / jnp.maximum(jnp.sum(metrics.count[TEXT + 1 :]), 1.0)


def make_optimizer(*, weight_decay: float, b2: float, clip: float) -> optax.GradientTransformation:
    """Makes AdamW with clipped gradients; every step sets the learning rate."""

    def is_kernel(params: Params) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
            learning_rate=0.0, b2=b2, weight_decay=weight_decay, mask=is_kernel
        ),
    )


def init_state(params: Params, optimizer: optax.GradientTransformation) -> State:
    """Makes the state before the first step."""
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def train_step(
    state: State,
    tokens: UInt[Array, "B T1"],
    classes: UInt[Array, "B T"],
    learning_rate: Float[Array, ""],
    *,
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    dtype: str,
) -> tuple[State, Metrics]:
    """Makes one update; `model_config`, `optimizer` and compute `dtype` are static."""
    ids = tokens.astype(jnp.int32)

    def objective(params: Params) -> tuple[Float[Array, ""], Metrics]:
        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = logits_of(narrow, ids[:, :-1], model_config=model_config)
        metrics = sum_metrics(logits, ids[:, 1:], classes)
        return _objective(metrics), metrics

    gradients, metrics = jax.grad(objective, has_aux=True)(state.params)
    inner = state.optimizer
    inner[1].hyperparams["learning_rate"] = learning_rate
    updates, inner = optimizer.update(gradients, inner, state.params)
    return State(optax.apply_updates(state.params, updates), inner, state.step + 1), metrics


def validation_step(
    params: Params,
    tokens: UInt[Array, "B T1"],
    classes: UInt[Array, "B T"] | None = None,
    *,
    model_config: ModelConfig,
) -> tuple[Float[Array, "B T"], Array]:
    """Computes the loss of every target, and whether the likeliest token is right."""
    del classes
    ids = tokens.astype(jnp.int32)
    logits = logits_of(params, ids[:, :-1], model_config=model_config)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return loss, jnp.argmax(logits, axis=-1) == ids[:, 1:]
