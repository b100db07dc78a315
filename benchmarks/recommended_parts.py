"""What each part of `recommended_blocks` is worth: the policy with one part changed at a time.

    python benchmarks/recommended_parts.py --model FILE.gguf [--seconds 500]
    python benchmarks/report.py      # anywhere: the table

On instruction models and on the bundled one, on prompts of which none is reported elsewhere, with
each model's plan (`sketchwalk calibrate`). Its arguments are those of `real_models.py`. Some parts
are no options of the package, because they are worth less than what stands in their place: pages of
keys instead of single keys, means of neighbouring queries instead of the farthest ones; or more,
but cost more: keys that are not rounded.
"""

import dataclasses
from argparse import Namespace
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import real_models
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from sketchwalk_jax.evaluation.results import ResultsFile
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, ScorePolicy, Span
from sketchwalk_jax.policies.block_codes import block_scores
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.policies.recommended import RecommendedConfig

OUT = common.RESULTS / "recommended_parts.json"
TASKS = ("single_needle", "multi_key", "mid_prompt", "text_loss")
PHASES = ("prefill", "decode")
# What changes nothing for a decoded token, whose own query stands for itself beside its own block.
_OF_PROMPTS = frozenset({"representatives", "local_tokens"})
CHANGES: tuple[dict[str, Any], ...] = (
    {"representatives": 1},
    {"representatives": 4},
    {"representatives": 16},
    {"representatives": 32},
    {"exponent": 1},
    {"exponent": 2},
    {"exponent": 8},
    {"decay": 0.0},
    {"local_tokens": 0},
    {"local_tokens": 0, "min_tokens": 128},
)
NO_PLAN = "no plan"
NO_WEIGHTS = "a plan of output errors alone"
SAME_QUERIES = "the same number of queries in all layers"
MEANS = "means of neighbouring queries"


def main() -> None:
    """Runs what the file lacks."""
    real_models.main(
        find_rules=find_rules,
        description=__doc__,
        stage="development",
        out=OUT,
        task=TASKS,
        phase=PHASES,
        tokens=[8192],
        prompts=32,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksConfig(RecommendedConfig):
    """`SketchWalkConfig.recommended_blocks` as a class, for those that change a part of it."""

    page_size: int | None = None
    sink_tokens: int | None = None
    local_tokens: int | None = None
    min_tokens: int | None = None
    early_representatives: tuple[tuple[int, int], ...] = ()
    exponent: int = 4
    decay: float = 0.7
    repays: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeansConfig(BlocksConfig):
    """Means of neighbouring queries stand for a row."""

    def represent(
        self,
        query: Float[Array, "B T N H"],
        valid: Bool[Array, "B T"],
        count: int,
        kernel_config: KernelConfig | None = None,
    ) -> Float[Array, "B I R N C"]:
        """`count` means of as many neighbours each."""
        query = query[..., self.channels(query.shape[-1])]
        parts = query.reshape(query.shape[0], -1, count, self.block_size // count, *query.shape[2:])
        is_query = valid.reshape(parts.shape[:4])[..., None, None]
        total = jnp.sum(jnp.where(is_query, parts, 0.0).astype(jnp.float32), axis=3)
        number = jnp.sum(is_query, axis=3, dtype=jnp.float32)
        return (total / jnp.maximum(number, 1.0)).astype(query.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SingleKeys:
    """Keys as they are, in the place of codes.

    Attributes:
      key: The keys, `[B, J, S, K, C]`.
    """

    key: Float[Array, "B J S K C"]

    @property
    def num_blocks(self) -> int:
        """Blocks that there is room for."""
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        """Keys of a block."""
        return self.key.shape[2]

    @property
    def centre(self) -> Float[Array, "B J K C"]:
        """Nothing is taken off."""
        return jnp.zeros_like(self.key[:, :, 0])

    def residual(
        self, block: Int[Array, ""], count: int, dtype: DTypeLike
    ) -> Float[Array, "B W K C"]:
        """The keys of `count` blocks."""
        keys = jax.lax.dynamic_slice_in_dim(self.key, block, count, axis=1)
        return keys.reshape(keys.shape[0], -1, *keys.shape[3:]).astype(dtype)

    def add(self, key: Float[Array, "B T K C"], span: Span) -> "SingleKeys":
        """The keys with those of a span."""
        flat = self.key.reshape(self.key.shape[0], -1, *self.key.shape[3:])
        place = span.start(self.block_size)[:, None] + jnp.arange(key.shape[1])[None, :]
        place = jnp.where(span.valid, place, flat.shape[1])  # or dropped
        sequence = jnp.arange(key.shape[0])[:, None]
        flat = flat.at[sequence, place].set(key.astype(flat.dtype), mode="drop")
        return SingleKeys(flat.reshape(self.key.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactConfig(BlocksConfig):
    """Keys that are not rounded.

    Attributes:
      channels_of: `"slow"` or `"all"`.
    """

    channels_of: str = "slow"

    def channels(self, head_dim: int) -> Int[np.ndarray, "C"]:
        """The channels that count."""
        return super().channels(head_dim) if self.channels_of == "slow" else np.arange(head_dim)

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> Any:
        """No keys."""
        size = (batch, num_blocks, self.block_size, shape.num_kv_heads)
        return SingleKeys(jnp.zeros((*size, len(self.channels(shape.head_dim))), shape.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesConfig(ExactConfig):
    """Pages of keys in place of single keys: the bound `q · centre + width · |q| · radius`.

    Attributes:
      keys_of_page: Keys of a page.
      shape: `"spread"`, mean and standard deviation, or `"box"`, middle and half the width.
      width: Factor of the radius.
    """

    channels_of: str = "all"
    keys_of_page: int = 8
    shape: str = "spread"
    width: float = 0.5

    def evidence(
        self,
        queries: Float[Array, "B I R N C"],
        codes: Any,
        rows: Int[Array, "B I"],
        *,
        kv_lengths: Int[Array, "B"],
        scale: float,
        heads: Heads | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Float[Array, "B I J"]:
        """The scores of the best page of each block, made of products with twice the channels."""
        keys = codes.key.astype(jnp.float32)
        pages = self.block_size // self.keys_of_page
        keys = keys.reshape(*keys.shape[:2], pages, self.keys_of_page, *keys.shape[3:])
        place = jnp.arange(keys.shape[1] * self.block_size).reshape(1, -1, pages, self.keys_of_page)
        is_key = (place < kv_lengths[:, None, None, None])[..., None, None]
        if self.shape == "box":
            low = jnp.min(jnp.where(is_key, keys, jnp.inf), axis=3)
            high = jnp.max(jnp.where(is_key, keys, -jnp.inf), axis=3)
            centre, radius = 0.5 * (low + high), 0.5 * (high - low)
        else:
            number = jnp.maximum(jnp.sum(is_key, axis=3, dtype=jnp.float32), 1.0)
            centre = jnp.sum(jnp.where(is_key, keys, 0.0), axis=3) / number
            away = jnp.where(is_key, keys - centre[:, :, :, None], 0.0)
            radius = jnp.sqrt(jnp.sum(away**2, axis=3) / number)
        found = SingleKeys(jnp.concatenate([centre, radius], axis=-1).astype(codes.key.dtype))
        both = jnp.concatenate([queries, self.width * jnp.abs(queries)], axis=-1)
        lengths = -(-kv_lengths // self.keys_of_page)
        return block_scores(
            both.astype(queries.dtype),
            found,
            rows,
            kv_lengths=lengths,
            scale=scale,
            exponent=self.exponent,
            heads=heads,
        )


@dataclasses.dataclass(frozen=True)
class PartRule(Rule):
    """The policy of another class.

    Attributes:
      made: The class.
    """

    made: type[ScorePolicy] = BlocksConfig

    def make(self) -> ScorePolicy:
        """The policy itself."""
        return self.made(density=self.density, **dict(self.fields))


def find_rules(
    _: ResultsFile, model: str, options: Namespace, model_config: ModelConfig
) -> tuple[Rule, ...]:
    """The policy, each change of it, and the exact ranking, at every density.

    Raises:
      SystemExit: If the model has no plan.
    """
    plan = model_config.plan
    if plan is None:
        raise SystemExit(f"{model} must have a plan: sketchwalk calibrate --model")
    found: list[Rule] = []
    for density in options.density:
        found.append(Rule("sketchwalk", "recommended_blocks", density))
        for change in CHANGES:
            found.append(_rule(density, change, is_of_prompts=not _OF_PROMPTS.isdisjoint(change)))
        ones = (1.0,) * plan.num_layers
        one_number = BlocksConfig().representatives
        others = {
            NO_PLAN: None,
            NO_WEIGHTS: dataclasses.replace(plan, weights=ones),
            SAME_QUERIES: dataclasses.replace(
                plan, representatives=(one_number,), misses=((0.0,),) * plan.num_layers
            ),
        }
        for name, other in others.items():
            is_of_prompts = name == SAME_QUERIES
            found.append(_rule(density, {"plan": other}, name, is_of_prompts=is_of_prompts))
        found.append(_rule(density, {}, MEANS, MeansConfig, is_of_prompts=True))
        found.append(_rule(density, {}, "keys that are not rounded", ExactConfig))
        every = {"channels_of": "all"}
        found.append(_rule(density, every, "keys that are not rounded, all channels", ExactConfig))
        every = every | {"representatives": 64}
        found.append(
            _rule(density, every, "all queries, all of the keys", ExactConfig, is_of_prompts=True)
        )
        for page in (
            {"keys_of_page": 8},
            {"keys_of_page": 16},
            {"keys_of_page": 16, "shape": "box", "width": 1.0},
        ):
            name = f"pages of {page['keys_of_page']} keys, {page.get('shape', 'spread')}"
            found.append(_rule(density, page, name, PagesConfig))
        found.append(real_models.exact_ceiling(density))
    return tuple(found)


def _rule(
    density: float,
    change: dict[str, Any],
    name: str | None = None,
    made: type[BlocksConfig] = BlocksConfig,
    *,
    is_of_prompts: bool = False,
) -> Rule:
    name = name or ", ".join(f"{field}={value}" for field, value in change.items())
    phases = PHASES[:1] if is_of_prompts else None
    fields = tuple(sorted(change.items()))
    return PartRule(
        "sketchwalk", "recommended_blocks", density, fields, name, phases=phases, made=made
    )


if __name__ == "__main__":
    main()
