"""Defines everything that a training run depends on: sizes, stages, durations, rates."""

import dataclasses
import math

from sketchwalk_jax.models.config import ModelConfig, RopeConfig

TEXT_SHARE_FOR_VALIDATION = 0.03
VOCAB_SIZE = 1024
CONTEXT = 16384

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=VOCAB_SIZE,
    num_layers=12,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=CONTEXT,
    rope=RopeConfig(theta=500_000.0),
    bos_token_id=0,
    eos_token_ids=(1,),
    dtype="bfloat16",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run with one shape of batch.

    Attributes:
      length: Tokens of a sequence.
      sequences: Sequences of a batch.
      share: Share of the run's time; ignored if steps are given.
    """

    length: int
    sequences: int
    share: float


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
      stages: Stages, short sequences first: retrieval is learned on them, and much faster.
      peak: Highest learning rate, reached after `warm_up` steps.
      final: Learning rate at the end, as a share of the highest; a half cosine leads there.
      warm_up: Steps of linear increase.
      weight_decay: Weight decay of AdamW, on kernels.
      b2: Second-moment decay of AdamW.
      clip: Largest norm of the gradient.
      lists_chains: Whether the answer to a chain of variables lists its names down to the number,
        or is only the number.
      hops: Shares of chains of 1, 2, ... statements.
    """

    stages: tuple[Stage, ...]
    peak: float
    final: float = 0.05
    warm_up: int = 300
    weight_decay: float = 0.05
    b2: float = 0.95
    clip: float = 1.0
    lists_chains: bool = True
    hops: tuple[float, ...] = (0.25, 0.2, 0.17, 0.14, 0.12, 0.12)

    def learning_rate(self, step: int, progress: float) -> float:
        """Returns the learning rate at a step, `progress` in [0, 1] through the run."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.peak * warm * (self.final + (1 - self.final) * cosine)


RECIPES = {
    "scratch": Recipe(
        stages=(
            Stage(512, 64, 0.3),
            Stage(1024, 32, 0.15),
            Stage(2048, 32, 0.2),
            Stage(4096, 16, 0.2),
            Stage(8192, 8, 0.15),
        ),
        peak=2e-3,
        final=0.25,  # the recipe "continue" starts from this rate
        # In this time a model of this size does not learn to follow two statements within one
        # token: asked for the number only, it guesses among all chains' numbers. So "continue" asks
        # for the whole chain.
        lists_chains=False,
        hops=(0.3, 0.28, 0.16, 0.11, 0.08, 0.07),
    ),
    "continue": Recipe(
        stages=(
            Stage(1024, 32, 0.1),
            Stage(4096, 16, 0.15),
            Stage(8192, 8, 0.2),
            Stage(16384, 4, 0.55),
        ),
        peak=1e-3,
        final=0.02,
        warm_up=100,
    ),
}
