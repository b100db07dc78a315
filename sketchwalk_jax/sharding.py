"""Placement of a model on several devices: `place` makes all shardings from a mesh and a model.

A mesh has up to three axes. Any of them may be missing or have size 1:

* `data`: the sequences of a batch. Ranks exchange only a few numbers per sequence.
* `tensor`: heads, columns of the mlp and of each expert, and the vocabulary.
* `sequence`: rows (query blocks) of a prompt, and blocks of the cache.

**Traffic over `tensor`.** Let a rank have `B` sequences and `T` new tokens of each (1 in decode).
In one layer, in addition to a few numbers per sequence, each rank receives

* for the dense algebra: twice the sum over ranks of hidden states, `B · T · D` numbers, which are
  float32 for a mixture of experts;
* for policies that need all heads (`SketchWalkConfig`, `released`, and any policy without support
  for meshes): queries and keys, `B · T · (N + K) · H` numbers;
* for `recommended`, before lists are made: float32 scores of `I` rows and `J` blocks. On XLA they
  are the scores of each of `R` representatives, `4 · B · N · R · I · J` bytes. With kernels they
  are summed within key/value heads, `4 · B · K · I · J` bytes, or twice as much if a head has many
  queries;
* for the oracle: scores of each head, `4 · B · N · I · J` bytes, or the largest, `4 · B · I · J`;
* for policies with lists for each head (Quest, Adamas, MInference, FlexPrefill): nothing.

For given queries, keys and values the lists equal one device's lists exactly, because all sums have
the same order. (There is one exception: kernels that score for fewer key/value heads than there are
ranks divide their sums differently. All ranks still agree with each other.)

**Traffic over `sequence`.** `docs/several_gpus.md` says how ranks share the rows of a prompt and
the blocks of the cache. If a rank has `K` key/value heads, in one layer it receives

* for a prompt of `T` tokens over all ranks: keys and values, `2 · B · T · K · H` numbers. If the
  prompt is read in pieces, or after other tokens, it also receives the whole cache with room for
  `S` tokens, `2 · B · S · K · H` numbers more for each piece;
* for `SketchWalkConfig`: float32 sketches of `I` rows, `2 · 4 · B · I · C · R` bytes. For other
  policies: nothing, because their statistics depend only on keys;
* for a decoded token: no keys or values, but the other ranks' outputs over their blocks, float32
  `B · N · H` for the rank's own heads, and two numbers per head. All ranks make the same lists.

Statistics are small compared with keys and values, and are replicated over `sequence`; so are the
parameters. The ranks share the dense algebra of a prompt without any traffic. They do not share the
dense algebra of a decoded token.

**Traffic outside the layers.** A call sums embeddings, and over `sequence` the hidden states of the
tokens whose logits are returned. It gathers the logits from which tokens are drawn. These are
`B · T · D`, `B · D` and `B · V` numbers.

XLA partitions the dense algebra by the shardings of the parameters. The cache, selection and
attention of a layer run under `jax.shard_map`, where each rank has its own heads and sequences
(`exchange`). So does a mixture of experts: each rank has its own tokens, and a part of the width of
every expert. All ranks of `tensor` choose the same experts, since each one has the whole router.
Functions that take parameters find the mesh from them (`placement_of`), also under your own `jit`.
So calls look the same on one device and on many:

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placement = place(mesh, ModelConfig.from_pretrained("Llama-3.1-8B"))
    params, model_config = load("Llama-3.1-8B", sharding=placement)
    generate(params, tokens, model_config=model_config, max_new_tokens=64)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Num

from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.experts import mixture
from sketchwalk_jax.models.params import Params, flatten_params, param_shapes, unflatten_params
from sketchwalk_jax.models.transformer import Mix, embed, linear_of_rows
from sketchwalk_jax.pallas_kernels.config import KernelConfig, why_not_swiglu_quantize
from sketchwalk_jax.pallas_kernels.decode_matmul.api import choose_decode_matmul, swiglu_quantize
from sketchwalk_jax.policies.base import LayerShape, Policy
from sketchwalk_jax.policies.ranks import Blocks, Heads
from sketchwalk_jax.validation import describe

PyTree = Any
AXES = ("data", "sequence", "tensor")
"""Names that the axes of a mesh may have."""

# Axis of each parameter that `tensor` spreads, by the parameter's path without `layers`. Biases of
# `out` and `down` are added once, to the sum over ranks.
_SPREAD: dict[tuple[str, ...], int] = {
    ("embed", "embedding"): 0,
    ("lm_head", "kernel"): 1,
    **{
        (name, part): axis
        for name in ("query", "key", "value", "gate", "up")
        # Quantized weights have their outputs first.
        for part, axis in (("kernel", 2), ("bias", 1), ("quantized", 1), ("scales", 1))
    },
    **{
        (name, part): axis
        for name in ("out", "down")
        for part, axis in (("kernel", 1), ("quantized", 2))
    },
    # The width of each expert; experts have an axis more.
    **{
        (name, part): axis
        for name in ("expert_gate", "expert_up")
        for part, axis in (("kernel", 3), ("quantized", 2), ("scales", 2))
    },
    ("expert_down", "kernel"): 2,
    ("expert_down", "quantized"): 3,
}
_INPUTS_SPREAD = {"out", "down"}


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """Placement of a model's arrays on a mesh; made by `place`.

    It maps a parameter's path and shape to a sharding, so `load(sharding=...)` accepts it;
    `init_cache(sharding=...)` accepts it too. It is hashable, so it can be static under `jit`.

    Attributes:
      mesh: The mesh. All of its axes are `AxisType.Auto`.
      model_config: Configuration of the model.

    Raises:
      ValueError: If the mesh has other axes, or sizes are not divisible.
    """

    mesh: Mesh | AbstractMesh
    model_config: ModelConfig

    def __post_init__(self) -> None:
        """Checks axes and sizes."""
        unknown = [name for name in self.mesh.axis_names if name not in AXES]
        if unknown:
            raise ValueError(f"mesh must have axes among {AXES}, got {unknown}")
        if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
            raise ValueError(
                "mesh must have axes of type Auto, which XLA partitions over: make it with "
                f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * "
                f"{len(self.mesh.axis_names)}), got {self.mesh.axis_types}"
            )
        ranks, c = self.size("tensor"), self.model_config
        problems = [f"{name} {size}" for name, size in _shared_sizes(c).items() if size % ranks]
        if c.num_kv_heads % ranks and ranks % c.num_kv_heads:
            problems.append(f"num_kv_heads {c.num_kv_heads} (or be a multiple of it)")
        if problems:
            fitting = [n for n in range(1, c.num_heads + 1) if _fits(n, c)]
            raise ValueError(
                f"the mesh's tensor axis must divide {' and '.join(problems)}, got {ranks}; make "
                f"it one of {fitting}, and put the other devices on data"
            )

    def size(self, axis: str) -> int:
        """Number of ranks along an axis; 1 if the mesh does not have the axis."""
        return self.mesh.shape.get(axis, 1)

    @property
    def heads(self) -> Heads | None:
        """Distribution of heads over `tensor`, or `None` if every rank has all heads."""
        ranks, c = self.size("tensor"), self.model_config
        return Heads("tensor", ranks, c.num_heads, c.num_kv_heads) if ranks > 1 else None

    @property
    def blocks(self) -> Blocks | None:
        """Distribution of blocks over `sequence`, or `None` if every rank has all blocks."""
        ranks = self.size("sequence")
        return Blocks("sequence", ranks) if ranks > 1 else None

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads in caches: the model's number, but at least one per rank."""
        return max(self.model_config.num_kv_heads, self.size("tensor"))

    # Shardings.

    def __call__(self, path: tuple[str, ...], shape: jax.ShapeDtypeStruct | Array) -> NamedSharding:
        """Returns the sharding of a parameter, for `load`.

        Args:
          path: Path of the parameter, such as `("layers", "query", "kernel")`.
          shape: The parameter.
        """
        axis = _SPREAD.get(path[-2:])
        # The checked sizes divide; key/value heads and the vocabulary may not.
        if axis is None or shape.shape[axis] % self.size("tensor"):
            return self.sharding()
        return self.sharding(*[None] * axis, "tensor")

    @property
    def params(self) -> Params:
        """The shardings of all parameters, as a tree with their layout."""
        shapes = flatten_params(param_shapes(self.model_config))
        return unflatten_params({path: self(path, shape) for path, shape in shapes.items()})

    @property
    def tokens(self) -> NamedSharding:
        """Sharding of prompts `[B, T]`, and of tokens and lengths `[B]`."""
        return self.sharding("data")

    def statistics(self, policy: Policy) -> PyTree:
        """Returns the shardings of a policy's statistics, stacked as in a cache.

        Sequences are spread over `data`. Heads are spread over `tensor` if ranks select by their
        own heads.
        """

        def make(batch: int, shape: LayerShape) -> PyTree:
            return policy.init_statistics(shape, batch=batch, num_blocks=1)

        shape = self.layer_shape(policy)
        twice = dataclasses.replace(
            shape, num_heads=2 * shape.num_heads, num_kv_heads=2 * shape.num_kv_heads
        )
        by_sequence = _growing_axes(lambda: make(1, shape), lambda: make(2, shape))
        by_head = _growing_axes(lambda: make(1, shape), lambda: make(1, twice))
        split = "tensor" if policy.heads_on_mesh != "all" else None
        return jax.tree.map(
            lambda sequence, head: self.sharding(None, *_names({sequence: "data", head: split})),
            by_sequence,
            by_head,
        )

    def cache(self, policy: Policy) -> dict[str, PyTree]:
        """Returns the shardings of a cache's arrays by field.

        Lengths and measured density are a few numbers per sequence. They are replicated, so that
        every host can read them.
        """
        keys = self.sharding(None, "data", "sequence", "tensor")
        return {
            "key": keys,
            "value": keys,
            "statistics": self.statistics(policy),
            "lengths": self.sharding(),
            "density": self.sharding(),
        }

    def walk(self, policy: Policy, *, is_token: bool) -> PyTree:
        """Returns the shardings of the walk.

        Sequences are spread over `data`, and rows of a prompt over `sequence`.
        """
        make = functools.partial(policy.init_walk, num_rows=1, num_blocks=1)
        by_sequence = _growing_axes(lambda: make(batch=1), lambda: make(batch=2))
        split = None if is_token else "sequence"
        return jax.tree.map(
            lambda sequence, row: self.sharding(*_names({sequence: "data", row: split})),
            by_sequence,
            self.rows_of_walk(policy),
        )

    def rows_of_walk(self, policy: Policy) -> PyTree:
        """Returns the axis of rows in every array of the walk; -1 if it has none."""
        make = functools.partial(policy.init_walk, batch=1, num_blocks=1)
        return _growing_axes(lambda: make(num_rows=1), lambda: make(num_rows=2))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding of an array, given a mesh axis for each of its axes.

        Args:
          *axes: Names of mesh axes. An axis that is missing or has size 1 spreads nothing.
        """
        names = [name if name and self.size(name) > 1 else None for name in axes]
        while names and names[-1] is None:
            names.pop()
        return NamedSharding(self.mesh, PartitionSpec(*names))

    # Sizes and checks.

    def dividing(self, shape: tuple[int, ...]) -> list[str | None]:
        """Returns the mesh axes that divide sequences and tokens of an array `[B, T]`."""
        return [
            axis if size % self.size(axis) == 0 else None
            for axis, size in zip(("data", "sequence"), shape, strict=True)
        ]

    def layer_shape(self, policy: Policy, dtype: DTypeLike = jnp.float32) -> LayerShape:
        """Returns the sizes for which a policy allocates its statistics."""
        c = self.model_config
        kv_heads = c.num_kv_heads if policy.heads_on_mesh == "all" else self.num_kv_heads
        return LayerShape(c.num_heads, kv_heads, c.head_dim, dtype)

    def num_blocks(self, wanted: int) -> int:
        """Rounds a cache's number of blocks up to a multiple of the ranks of `sequence`."""
        return wanted + -wanted % self.size("sequence")

    def check_policy(self, policy: Policy) -> None:
        """Raises if a policy cannot select while the blocks of a sequence are spread over ranks."""
        if self.size("sequence") > 1 and policy.blocks_on_mesh == "none":
            raise NotImplementedError(
                f"the mesh's sequence axis must be 1 for {type(policy).__name__}, which selects "
                f"with all queries and keys of a sequence at hand, got {self.size('sequence')}; "
                f"put its devices on data or tensor, or use a policy with blocks_on_mesh, such as "
                f"SketchWalkConfig.recommended() or Dense()"
            )

    def check_batch(self, batch: int) -> None:
        """Raises unless the size of `data` divides the number of sequences."""
        ranks = self.size("data")
        if batch % ranks:
            raise ValueError(
                f"the mesh's data axis must divide the number of sequences, got {batch} sequences "
                f"for {ranks} ranks; pad the batch to {batch + -batch % ranks}, or make the axis "
                f"smaller"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Costs of this placement that a smaller `tensor` axis would avoid."""
        ranks, c = self.size("tensor"), self.model_config
        found = []
        if ranks > c.num_kv_heads:
            copies = ranks // c.num_kv_heads
            found.append(
                f"each of {c.num_kv_heads} key/value heads lies on {copies} of {ranks} ranks: "
                f"caches take {copies} times the memory in all, and every rank keeps and "
                f"multiplies by the projections of all keys and values"
            )
        if c.vocab_size % ranks:
            found.append(
                f"{ranks} ranks do not divide a vocabulary of {c.vocab_size}: every rank keeps the "
                f"whole embedding and output head"
            )
        return tuple(found)

    def __repr__(self) -> str:
        """Describes the sizes of the axes, and the notes."""
        axes = ", ".join(f"{name}={self.size(name)}" for name in AXES if self.size(name) > 1)
        return "; ".join([f"Placement({axes or 'one device'})", *self.notes])


def place(mesh: Mesh | AbstractMesh, model_config: ModelConfig) -> Placement:
    """Decides the placement of a model's parameters, cache, statistics and tokens on a mesh.

    Over `tensor`, each rank has `N / tensor` query heads with their key/value heads, and a part of
    the mlp's columns and of the vocabulary. Of a mixture of experts, each rank has `M / tensor`
    columns of every expert, and the whole router. If there are fewer key/value heads than ranks,
    each one is replicated on `tensor / K` ranks, whose caches have one head each. So with more than
    `K` ranks, attention gets faster but caches do not get smaller (`Placement.notes` says so). A
    vocabulary that is not divisible is replicated too.

    Over `data`, each rank has a part of the sequences. Over `sequence`, each rank has a part of the
    tokens of each sequence, in prefill and in the cache. Calls pad a prompt to a multiple of
    `2 · sequence` blocks and a cache to a multiple of `sequence` blocks, so any number of tokens
    works.

    Args:
      mesh: A mesh with axes among `data`, `sequence` and `tensor`, any of which may be missing. Its
        axes must be of type Auto (`jax.make_mesh` makes Explicit ones by default).
      model_config: Configuration of the model.

    Returns:
      A `Placement`, for `load(sharding=...)` and `init_cache(sharding=...)`.

    Raises:
      ValueError: If the mesh has other axes, or sizes are not divisible. The message says which
        sizes would work.

    Example:
      >>> from sketchwalk_jax.models import ModelConfig
      >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512)
      >>> auto = jax.sharding.AxisType.Auto
      >>> mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(auto, auto))
      >>> placement = place(mesh, config)
      >>> tuple(placement.params["layers"]["gate"]["kernel"].spec)
      (None, None, 'tensor')
      >>> placement.num_kv_heads, len(placement.notes)
      (4, 1)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a mesh from jax.make_mesh, got {describe(mesh)}")
    check_model_config(model_config)
    return Placement(mesh, model_config)


@functools.lru_cache(maxsize=64)
def _placement(mesh: Mesh | AbstractMesh, model_config: ModelConfig) -> Placement | None:
    if mesh.empty or mesh.size == 1 or not set(mesh.axis_names) <= set(AXES):
        return None
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return place(mesh, model_config)


def placement_of(params: PyTree, model_config: ModelConfig) -> Placement | None:
    """Returns the placement that parameters were loaded with, or `None` on one device.

    An array knows its mesh, also under `jit`. The mesh and the model determine the placement of
    everything else. Parameters on a mesh with other axes have no placement. XLA then chooses how to
    partition everything that is computed from them, including selection and attention.

    Args:
      params: Parameter tree.
      model_config: Configuration of the model.

    Raises:
      ValueError: If the mesh does not fit the model.
    """
    try:
        embedding = params["embed"]["embedding"]
    except (KeyError, TypeError, IndexError):  # the check of parameters reports this
        return None
    if isinstance(embedding, jax.core.Tracer):
        return _placement(jax.typeof(embedding).sharding.mesh, model_config)
    sharding = getattr(embedding, "sharding", None)
    return _placement(sharding.mesh, model_config) if isinstance(sharding, NamedSharding) else None


def lies_on_one_device(params: PyTree) -> bool:
    """Whether parameters are known to be on one device, even if this process has others.

    Under your own `jit` this is unknown, unless there is only one device.
    """
    if jax.device_count() == 1:
        return True
    if any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(params)):
        return False
    return len(devices_of(params)) == 1


def devices_of(params: PyTree) -> set[jax.Device]:
    """Returns the devices that arrays are on. NumPy arrays are on none."""
    arrays = [one for one in jax.tree.leaves(params) if isinstance(one, jax.Array)]
    return set[jax.Device]().union(*(one.devices() for one in arrays))


def constrain(x: PyTree, placement: Placement | None, *axes: str | None) -> PyTree:
    """Spreads arrays over the given mesh axes; returns them unchanged if there is no mesh.

    The names are those of `Placement.sharding`; each array has at least as many axes.
    """
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, placement.sharding(*axes))


def embed_tokens(
    params: PyTree, tokens: Int[Array, "B T"], placement: Placement | None
) -> Float[Array, "B T D"]:
    """`embed`, but on a mesh each rank looks up the tokens whose embeddings it has.

    Without this function, XLA would gather the whole table for a batch of one token. Sequences and
    tokens are spread over the axes that divide them.

    A prompt's ids are in the order of `Blocks.deal`. Ids outside the vocabulary are clamped.
    """
    if placement is None:
        return embed(params, tokens)
    table, ranks = params["embed"]["embedding"], placement.size("tensor")
    axes = placement.dividing(tokens.shape)
    if ranks == 1 or table.shape[0] % ranks:
        return constrain(embed(params, tokens), placement, *axes)
    by_token = placement.sharding(*axes).spec

    def look_up(table: Float[Array, "V1 D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        own = jnp.clip(tokens, 0, ranks * table.shape[0] - 1)
        own = own - jax.lax.axis_index("tensor") * table.shape[0]
        is_here = (own >= 0) & (own < table.shape[0])
        found = table.at[own].get(mode="clip")
        return jax.lax.psum(jnp.where(is_here[..., None], found, 0), "tensor")

    return jax.shard_map(
        look_up,
        mesh=placement.mesh,
        in_specs=(placement.sharding("tensor").spec, by_token),
        out_specs=by_token,
        check_vma=False,
    )(table, tokens)


def take_dealt_columns(
    hidden: Float[Array, "B T D"], columns: Int[Array, "B U"], placement: Placement
) -> Float[Array, "B U D"]:
    """Takes the hidden states of some tokens: ranks that have them add them to others' zeros.

    Without this function, XLA would gather the hidden states of all tokens.

    Hidden states and columns are in the order of `Blocks.deal`, and the placement's `sequence` axis
    is larger than 1.
    """
    by_sequence = placement.sharding("data").spec

    def take(hidden: Float[Array, "B T1 D"], columns: Int[Array, "B U"]) -> Float[Array, "B U D"]:
        width = hidden.shape[1]
        own = columns - jax.lax.axis_index("sequence") * width
        is_here = (own >= 0) & (own < width)
        found = jnp.take_along_axis(hidden, jnp.clip(own, 0, width - 1)[..., None], axis=1)
        return jax.lax.psum(jnp.where(is_here[..., None], found, 0), "sequence")

    return jax.shard_map(
        take,
        mesh=placement.mesh,
        in_specs=(placement.sharding("data", "sequence").spec, by_sequence),
        out_specs=by_sequence,
        check_vma=False,
    )(hidden, columns)


def linear_on_ranks(
    x: Float[Array, "B T D"],
    weights: dict[str, Num[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "L D"] | None,
    eps: float,
    placement: Placement,
    kernel_config: KernelConfig,
    is_transposed: bool = False,
    weight_scales: list[Float[Array, "L _"]] | None = None,
) -> list[Float[Array, "B T _"]] | None:
    """`linear_of_rows`, where each rank uses its own part of the weights.

    If the columns are spread, a rank computes its part of the results. If the inputs are spread,
    each rank multiplies its own inputs, and the ranks sum the products. The kernel reads a rank's
    weights in place, as on one device.

    The arguments other than `placement`, that of the weights, are those of `linear_of_rows`.
    """
    ranks, c = placement.size("tensor"), placement.model_config
    of_inputs = set(weights) <= _INPUTS_SPREAD and ranks > 1
    # Inputs are the last axis of transposed weights, and otherwise the middle one.
    axis = 1 if of_inputs != is_transposed else 2

    def is_whole(name: str) -> bool:
        by_keys = name in ("key", "value") and c.num_kv_heads % ranks != 0
        return by_keys or (name in ("embed", "lm_head") and c.vocab_size % ranks != 0)

    of_weights, of_results, of_scales = [], [], []
    for name in weights:
        spread = None if is_whole(name) else "tensor"
        of_weights.append(placement.sharding(*[None] * axis, spread))
        of_results.append(placement.sharding("data", None, None if of_inputs else spread))
        of_scales.append(placement.sharding(None, None if of_inputs else spread))
    of_x = placement.sharding("data", None, "tensor" if of_inputs else None)

    def shards(shardings: list[NamedSharding], arrays: Iterable[Array]) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(sharding.shard_shape(one.shape), one.dtype)
            for sharding, one in zip(shardings, arrays, strict=True)
        ]

    batch, tokens, width = of_x.shard_shape(x.shape)
    rows = jax.ShapeDtypeStruct((batch * tokens, width), x.dtype)
    own_scales = None if weight_scales is None else shards(of_scales, weight_scales)
    kernel = choose_decode_matmul(are_quantized=weight_scales is not None)
    own = shards(of_weights, weights.values())
    if kernel.why_not(rows, own, scale, is_transposed=is_transposed, weight_scales=own_scales):
        return None

    def on_rank(
        x: Array,
        stacks: list[Array],
        layer: Array,
        scale: Array | None,
        weight_scales: list[Array] | None,
    ) -> list[Array]:
        # Restore the order of the names: in a tree they are sorted.
        own = dict(zip(weights, stacks, strict=True))
        found = linear_of_rows(
            x,
            own,
            layer,
            scale=scale,
            eps=eps,
            kernel_config=kernel_config,
            is_transposed=is_transposed,
            weight_scales=weight_scales,
        )
        assert found is not None  # checked by `why_not`
        return [jax.lax.psum(one, "tensor") for one in found] if of_inputs else found

    return jax.shard_map(
        on_rank,
        mesh=placement.mesh,
        in_specs=(
            of_x.spec,
            specs(of_weights),
            PartitionSpec(),
            PartitionSpec(),
            None if weight_scales is None else specs(of_scales),
        ),
        out_specs=specs(of_results),
        check_vma=False,
    )(x, list(weights.values()), layer, scale, weight_scales)


def mixture_on_ranks(
    x: Float[Array, "B T D"],
    is_token: Bool[Array, "B T"] | None,
    stacks: Mapping[str, Mapping[str, Num[Array, "L *rest"]]],
    layer: Int[Array, ""],
    *,
    model_config: ModelConfig,
    placement: Placement,
    scale: Float[Array, "D"] | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T D"]:
    """`mixture`, where each rank has its own tokens and its part of the width M of all experts.

    `data` and `sequence` spread sequences and tokens if they divide them. The ranks of `tensor` sum
    their results in float32.

    The arguments other than `placement` are those of `mixture`.
    """
    rows = placement.sharding(*placement.dividing(x.shape[:2])).spec
    options: dict[str, Any] = {
        "model_config": model_config,
        "kernel_config": kernel_config,
        "axis_name": "tensor" if placement.size("tensor") > 1 else None,
    }
    return jax.shard_map(
        lambda *given: mixture(*given[:-1], scale=given[-1], **options),
        mesh=placement.mesh,
        in_specs=(
            rows,
            rows,
            {
                name: {part: placement((name, part), one).spec for part, one in own.items()}
                for name, own in stacks.items()
            },
            PartitionSpec(),
            PartitionSpec(),
        ),
        out_specs=rows,
        check_vma=False,
    )(x, is_token, stacks, layer, scale)


def choose_mixture(placement: Placement | None, kernel_config: KernelConfig | None = None) -> Mix:
    """Returns `mixture_on_ranks` for a mesh and `mixture` for one device, with kernels if given."""
    if placement is None:
        return functools.partial(mixture, kernel_config=kernel_config)
    return functools.partial(mixture_on_ranks, placement=placement, kernel_config=kernel_config)


def gate_on_ranks(
    gate: Float[Array, "B T F"],
    up: Float[Array, "B T F"],
    row_scales: Float[Array, "B T"],
    gate_scales: Float[Array, "F"],
    up_scales: Float[Array, "F"],
    *,
    placement: Placement,
    kernel_config: KernelConfig,
) -> tuple[Float[Array, "B T F"], Float[Array, "B T"]] | None:
    """`swiglu_quantize`, where each rank has whole rows, of its own sequences and tokens.

    The arrays are those of `swiglu_quantize`; the placement's mesh does not use `tensor`.
    """
    by_rows = placement.sharding("data", "sequence")
    batch, tokens, width = by_rows.shard_shape(gate.shape)
    if why_not_swiglu_quantize(jax.ShapeDtypeStruct((batch * tokens, width), gate.dtype)):
        return None

    def on_rank(*arrays: Array) -> tuple[Array, Array]:
        found = swiglu_quantize(*arrays, kernel_config=kernel_config)
        assert found is not None  # checked above
        return found

    rows, whole = by_rows.spec, PartitionSpec()
    return jax.shard_map(
        on_rank,
        mesh=placement.mesh,
        in_specs=(rows, rows, rows, whole, whole),
        out_specs=(rows, rows),
        check_vma=False,
    )(gate, up, row_scales, gate_scales, up_scales)


def constrain_logits(
    logits: Float[Array, "B *T V"], placement: Placement | None
) -> Float[Array, "B *T V"]:
    """Spreads logits of all tokens over `tensor` too; keeps one token's whole, for sampling."""
    if placement is None:
        return logits
    axes = ["data"] + [None] * (logits.ndim - 2)
    if logits.shape[-1] % placement.size("tensor") == 0:
        # Constrain these first, so that XLA gathers the logits instead of the output head.
        logits = constrain(logits, placement, *axes, "tensor")
    return constrain(logits, placement, *axes) if logits.ndim == 2 else logits


def on_every_rank(
    function: Callable[..., PyTree], placement: Placement | None
) -> Callable[..., PyTree]:
    """Makes every rank call a function with whole arrays, for work that ranks do not share.

    Without this function, XLA would try to partition it, which is impossible if it launches
    kernels.

    The function takes arrays in any trees and must not close over arrays. Its result is the same on
    every rank. Without a placement, it is returned unchanged.
    """
    if placement is None:
        return function
    everywhere = PartitionSpec()
    return jax.shard_map(
        function,
        mesh=placement.mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )


def specs(shardings: PyTree) -> PyTree:
    """Returns the partition specs of shardings, for `jax.shard_map`."""
    return jax.tree.map(lambda one: one.spec, shardings)


def _growing_axes(small: Callable[[], PyTree], large: Callable[[], PyTree]) -> PyTree:
    """Finds for each array the axis in which its two shapes differ; -1 if none differs."""

    def axis(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> int:
        differ = [a != b for a, b in zip(one.shape, other.shape, strict=True)]
        return differ.index(True) if any(differ) else -1

    return jax.tree.map(axis, jax.eval_shape(small), jax.eval_shape(large))


def _names(by_axis: dict[int, str | None]) -> list[str | None]:
    """Lists the mesh axis of each axis of an array; an axis of -1 does not exist."""
    return [by_axis.get(axis) for axis in range(max(by_axis) + 1)]


def _fits(ranks: int, model_config: ModelConfig) -> bool:
    """Whether the number of ranks divides the heads and the columns of mlps and experts."""
    c = model_config
    by_kv = c.num_kv_heads % ranks == 0 or ranks % c.num_kv_heads == 0
    return by_kv and all(size % ranks == 0 for size in _shared_sizes(c).values())


def _shared_sizes(model_config: ModelConfig) -> dict[str, int]:
    """Sizes that the ranks of `tensor` share equally, by their names in the model."""
    names = ["num_heads"]
    names += ["intermediate_size"] if model_config.mlp_layers else []
    names += ["expert_intermediate_size"] if model_config.expert_layers else []
    return {name: getattr(model_config, name) for name in names}


def whole_batch(batch: int, placement: Placement | None) -> int:
    """Rounds the number of sequences up, so that all ranks of `data` have equally many."""
    return batch if placement is None else batch + -batch % placement.size("data")
