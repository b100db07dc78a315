"""What Sketch-and-Walk computes: one frozen, hashable configuration and its named presets.

A configuration says *what* is computed; how fast is the business of
`sketchwalk_jax.pallas_kernels.KernelConfig`, which never changes a result beyond rounding.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies import sketchwalk
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.walk import WalkState, init_walk

if TYPE_CHECKING:
    from sketchwalk_jax.policies.released import ReleasedConfig

HeadCombination = Literal["mean", "sum"]
Transition = Literal["power", "relu_power", "softmax"]

_HEAD_COMBINATIONS = ("mean", "sum")
_KEY_SKETCHES = ("mean",)
_TRANSITIONS = ("power", "relu_power", "softmax")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchWalkConfig(Policy):
    r"""Sketch-and-Walk block selection (arXiv:2602.07397, sections 2.2, 2.3 and Algorithms 1, 2).

    With block means `q̄[i]`, `k̄[j]` and sketch `Ω`, the block scores are
    `A[i, j] = (q̄[i] Ω)(k̄[j] Ω)ᵀ / sqrt(H)` for `j <= i`; a transition turns them into `W`
    (element-wise power) or `P` (causal row softmax); and the walk state of layer `k` is
    `R_k = R_{k-1} W_k` (equation 1), or with damping `X ← (1 - β) P + β X P`.
    Row `i` keeps the `count[i]` best key blocks of `R_k[i]`,
    `count[i] = min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))`.

    Instances are hashable and are passed to `jax.jit` as static arguments.

    Attributes:
      block_size: Tokens per block (a power of two, at least 16).
      sketch_dim: Columns of the subsampled randomised Hadamard transform. `None`, or a value not
        below the padded head dimension, makes no projection.
      seed: Seed of the one draw of the transform.
      head_combination: `"mean"` averages heads before scoring (the paper); `"sum"` adds up the
        scores of the heads.
      key_sketch: How a block's keys are summarised. `"mean"` is the paper's.
      transition: `"power"` is `A ** exponent`, `"relu_power"` is `max(A, 0) ** exponent`,
        `"softmax"` is the causal row softmax of `A`.
      exponent: The power `s` of the two power transitions, at most 32.
      walk_degree: Walk steps per layer.
      beta: Damping. `None` is the plain product; 0 keeps no memory at all (one hop); values in
        (0, 1) need the softmax transition, whose rows sum to one.
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      top_blocks: When set, a fixed number of blocks per row instead of `density`.
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      dense_tail: Last tokens of a prompt whose rows keep every block.
      dense_layers: Leading layers that stay dense; they neither read nor write the walk.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> SketchWalkConfig.paper(density=0.1).exponent
      8
    """

    sketch_dim: int | None = 64
    seed: int = 0
    head_combination: HeadCombination = "mean"
    key_sketch: Literal["mean"] = "mean"
    transition: Transition = "power"
    exponent: int = 8
    walk_degree: int = 1
    beta: float | None = None
    density: float = 0.2
    top_blocks: int | None = None
    sink_blocks: int = 1
    local_blocks: int = 1
    dense_tail: int = 0
    dense_layers: int = 2

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        _require(
            self.sketch_dim is None or _is_count(self.sketch_dim, 1),
            f"sketch_dim must be a positive integer or None, got {self.sketch_dim!r}",
        )
        for name, allowed in (
            ("head_combination", _HEAD_COMBINATIONS),
            ("key_sketch", _KEY_SKETCHES),
            ("transition", _TRANSITIONS),
        ):
            value = getattr(self, name)
            _require(value in allowed, f"{name} must be one of {allowed}, got {value!r}")
        for name, least in (
            ("seed", 0),
            ("exponent", 1),
            ("walk_degree", 1),
            ("sink_blocks", 0),
            ("local_blocks", 1),
            ("dense_tail", 0),
        ):
            value = getattr(self, name)
            _require(
                _is_count(value, least),
                f"{name} must be an integer of at least {least}, got {value!r}",
            )
        _require(self.exponent <= 32, f"exponent must be at most 32, got {self.exponent}")
        if self.beta is not None:
            _require(
                isinstance(self.beta, int | float) and 0.0 <= self.beta < 1.0,
                f"beta must be None or in [0, 1), got {self.beta!r}",
            )
            _require(
                self.beta == 0 or self.transition == "softmax",
                "beta must be None or 0 unless transition is 'softmax' (damping needs rows that "
                f"sum to one), got beta={self.beta!r} with transition={self.transition!r}",
            )
        _require(
            isinstance(self.density, int | float)
            and math.isfinite(self.density)
            and 0.0 < self.density <= 1.0,
            f"density must be in (0, 1], got {self.density!r}",
        )
        _require(
            self.top_blocks is None or _is_count(self.top_blocks, 1),
            f"top_blocks must be a positive integer or None, got {self.top_blocks!r}",
        )

    @classmethod
    def paper(cls, **overrides: Any) -> "SketchWalkConfig":
        """The method as printed: `R_k = R_{k-1} W_k` with `W = A ** 8`, head-mean scores."""
        return cls(**overrides)

    @classmethod
    def damped(cls, **overrides: Any) -> "SketchWalkConfig":
        """Softmax transitions with damping: `X ← (1 - β) P + β X P`, β = 0.25."""
        return cls(**{"transition": "softmax", "beta": 0.25, **overrides})

    @classmethod
    def one_hop(cls, **overrides: Any) -> "SketchWalkConfig":
        """The ablation without a walk: `R_k = P`, each layer selects by its own scores."""
        return cls(**{"transition": "softmax", "beta": 0.0, **overrides})

    @classmethod
    def released(cls, **overrides: Any) -> "ReleasedConfig":
        """The rule of the authors' published code; see `ReleasedConfig`."""
        from sketchwalk_jax.policies.released import ReleasedConfig

        return ReleasedConfig(**overrides)

    # The policy interface; see `Policy` for what each method promises.

    def init_statistics(
        self, shape: LayerShape, *, batch: int, num_blocks: int
    ) -> sketchwalk.SketchSums:
        """Zero sums in sketch space."""
        return sketchwalk.init_sums(self, shape, batch=batch, num_blocks=num_blocks)

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> WalkState:
        """The walk before the first sparse layer."""
        return init_walk(batch, num_rows, num_blocks)

    def observe(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: sketchwalk.SketchSums,
        *,
        span: Span,
    ) -> sketchwalk.SketchSums:
        """Adds the span's tokens to the sums."""
        return sketchwalk.observe(self, query, key, statistics, span=span)

    def select_prefill(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: sketchwalk.SketchSums,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> tuple[BlockSelection, WalkState]:
        """Algorithm 1 steps 5 to 7."""
        del key, layer
        return sketchwalk.select_prefill(self, query, statistics, walk, span=span)

    def select_decode(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: sketchwalk.SketchSums,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        positions: Int[Array, "B"],
    ) -> tuple[BlockSelection, WalkState]:
        """Algorithm 2 steps 3 to 6."""
        del layer
        return sketchwalk.select_decode(self, query, key, statistics, walk, positions=positions)
