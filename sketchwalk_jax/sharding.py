"""Where a model lies on several devices: `place`, from a mesh and a model to all shardings.

A mesh has up to three axes, any of which may be missing or 1:

* `data`: sequences of a batch. Nothing travels but a few numbers of each sequence.
* `tensor`: heads, columns of the mlp, the vocabulary.
* `sequence`: rows of a prompt, and blocks of the cache.

What each rank of `tensor` receives in one layer, with `B` sequences of its own and `T` new tokens
of each of its own (1 in decode), is, beside a few numbers of each sequence,

* of the dense algebra twice the sum over ranks of hidden states, `B · T · D` numbers;
* of policies that see all heads (Sketch-and-Walk but for `recommended`, `released`, and whatever
  knows nothing of meshes) queries and keys, `B · T · (N + K) · H` numbers;
* of `recommended`, before lists are made, float32 scores of `I` rows and `J` blocks, by each of `R`
  representatives on XLA, `4 · B · N · R · I · J` bytes, and added up within key/value heads by
  kernels, `4 · B · K · I · J` bytes, or twice as much where a head has many queries;
* of the oracle scores of each head, `4 · B · N · I · J` bytes, or the largest, `4 · B · I · J`;
* of policies with lists for each head (Quest, Adamas, MInference, FlexPrefill) nothing.

So lists are those of one device, bit for bit, for given queries, keys and values: nothing is added
up in another order. (Kernels that score for fewer key/value heads than there are ranks divide their
sums otherwise; ranks agree then too.)

Over `sequence`, a rank has rows of a prompt from its beginning and from its end, as `Blocks` deals
them, so that causal work is even, and with them all that is computed of their tokens, walk and
lists included. Keys and values go round before it attends: no row waits for another, and they are
few beside what attention reads. They travel while queries are projected and rows are scored, and so
all of them do: which blocks its rows list, a rank knows only then (`benchmarks/listed_blocks.py`
counts them), and statistics are of all keys. With `K` key/value heads of its own, each rank
receives in one layer

* of a prompt of `T` tokens of all ranks keys and values, `2 · B · T · K · H` numbers; and where the
  prompt is read in pieces, or behind others, those of the whole cache with room for `S` tokens,
  `2 · B · S · K · H` numbers more for each piece;
* of Sketch-and-Walk but for `recommended` float32 sketches of `I` rows, `2 · 4 · B · I · C · R`
  bytes; of the other policies nothing: their statistics are of keys alone;
* of a decoded token neither keys nor values, but what other ranks found at the blocks that they
  hold, float32 `B · N · H` with own heads and two numbers of each head; all ranks make the same
  lists.

Statistics, which are little beside keys and values, lie on all ranks of `sequence`, and so do the
parameters: the dense algebra of a prompt is shared, and nothing of it travels. That of a token is
not shared.

Beside its layers a call adds up embeddings, over `sequence` hidden states of the tokens whose
logits are wanted, and gathers the logits that are drawn from: `B · T · D`, `B · D` and `B · V`
numbers.

Dense algebra is left to XLA, which partitions it by the shardings of the parameters; the cache,
selection and attention of a layer run under `jax.shard_map`, where each rank has heads and
sequences of its own (`cached_layer.layer_attention`). Functions that take parameters learn of the
mesh from them (`placement_of`), under a `jit` of the caller's too, so that calls look the same on
one device and on many:

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placement = place(mesh, ModelConfig.from_pretrained("Llama-3.1-8B"))
    params, model_config = load("Llama-3.1-8B", sharding=placement)
    generate(params, tokens, model_config=model_config, max_new_tokens=64)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.params import Params, flatten_params, param_shapes, unflatten_params
from sketchwalk_jax.models.transformer import embed, linear_of_rows
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Blocks, Heads, LayerShape, Policy
from sketchwalk_jax.renamed import warn_renamed
from sketchwalk_jax.validation import describe

PyTree = Any
AXES = ("data", "sequence", "tensor")
"""Names that the axes of a mesh may have."""

# The axis of each parameter over which `tensor` spreads it, by its path without `layers`. Biases of
# `out` and `down` are added once, to what all ranks have added up.
_SPREAD: dict[tuple[str, ...], int] = {
    ("embed", "embedding"): 0,
    ("lm_head", "kernel"): 1,
    ("query", "kernel"): 2,
    ("query", "bias"): 1,
    ("key", "kernel"): 2,
    ("key", "bias"): 1,
    ("value", "kernel"): 2,
    ("value", "bias"): 1,
    ("out", "kernel"): 1,
    ("gate", "kernel"): 2,
    ("gate", "bias"): 1,
    ("up", "kernel"): 2,
    ("up", "bias"): 1,
    ("down", "kernel"): 1,
}
_INPUTS_SPREAD = {"out", "down"}


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """Where the arrays of a model lie on a mesh; `place` makes it.

    It is a function of a parameter's path and shape, as `load(sharding=...)` takes it, and
    `init_cache(sharding=...)` takes it too. Hashable, so static under `jit`.

    Attributes:
      mesh: The mesh, all of whose axes are `AxisType.Auto`.
      model_config: The model.

    Raises:
      ValueError: If the mesh has other axes, or sizes do not divide.
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
        sizes = {"num_heads": c.num_heads, "intermediate_size": c.intermediate_size}
        problems = [f"{name} {size}" for name, size in sizes.items() if size % ranks]
        if c.num_kv_heads % ranks and ranks % c.num_kv_heads:
            problems.append(f"num_kv_heads {c.num_kv_heads} (or be a multiple of it)")
        if problems:
            fitting = [n for n in range(1, c.num_heads + 1) if _fits(n, c)]
            raise ValueError(
                f"the mesh's tensor axis must divide {' and '.join(problems)}, got {ranks}; make "
                f"it one of {fitting}, and put the other devices on data"
            )

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 where the mesh lacks it."""
        return self.mesh.shape.get(axis, 1)

    @property
    def heads(self) -> Heads | None:
        """How heads are spread over `tensor`; `None` where every rank has all."""
        ranks, c = self.size("tensor"), self.model_config
        return Heads("tensor", ranks, c.num_heads, c.num_kv_heads) if ranks > 1 else None

    @property
    def blocks(self) -> Blocks | None:
        """How blocks of a sequence are spread over `sequence`; `None` where every rank has all."""
        ranks = self.size("sequence")
        return Blocks("sequence", ranks) if ranks > 1 else None

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads that caches have: those of the model, or one for each rank if more."""
        return max(self.model_config.num_kv_heads, self.size("tensor"))

    # Shardings.

    def __call__(self, path: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> NamedSharding:
        """The sharding of a parameter, as `load` asks for it.

        Args:
          path: Such as `("layers", "query", "kernel")`.
          shape: The parameter.
        """
        axis = _SPREAD.get(path[-2:])
        # Heads and columns of the mlp divide; key/value heads and the vocabulary may not.
        if axis is None or shape.shape[axis] % self.size("tensor"):
            return self.sharding()
        return self.sharding(*[None] * axis, "tensor")

    @property
    def params(self) -> Params:
        """The shardings of all parameters, a tree of their layout."""
        shapes = flatten_params(param_shapes(self.model_config))
        return unflatten_params({path: self(path, shape) for path, shape in shapes.items()})

    @property
    def tokens(self) -> NamedSharding:
        """The sharding of prompts `[B, T]`, of tokens and lengths `[B]`."""
        return self.sharding("data")

    def statistics(self, policy: Policy) -> PyTree:
        """The shardings of a policy's statistics, stacked as a cache has them.

        Sequences are spread over `data`, heads over `tensor` where ranks select by their own.
        """

        def make(batch: int, shape: LayerShape) -> PyTree:
            return policy.init_statistics(shape, batch=batch, num_blocks=1)

        shape = self.layer_shape(policy)
        twice = dataclasses.replace(
            shape, num_heads=2 * shape.num_heads, num_kv_heads=2 * shape.num_kv_heads
        )
        by_sequence = _growing_axes(lambda: make(1, shape), lambda: make(2, shape))
        by_head = _growing_axes(lambda: make(1, shape), lambda: make(1, twice))
        splits = policy.heads_on_mesh != "all"

        def sharding(sequence: int, head: int) -> NamedSharding:
            names: list[str | None] = [None] * (max(sequence, head) + 1)
            if sequence >= 0:
                names[sequence] = "data"
            if head >= 0 and splits:
                names[head] = "tensor"
            return self.sharding(None, *names)

        return jax.tree.map(sharding, by_sequence, by_head)

    def cache(self, policy: Policy) -> dict[str, PyTree]:
        """The shardings of a cache's arrays by field.

        Lengths and measured density, a few numbers of each sequence, lie everywhere, so that every
        host can read them.
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
        """The shardings of the state that crosses layers.

        Sequences are spread over `data`, rows of a prompt over `sequence`.
        """
        make = functools.partial(policy.init_walk, num_rows=1, num_blocks=1)
        by_sequence = _growing_axes(lambda: make(batch=1), lambda: make(batch=2))

        def sharding(sequence: int, row: int) -> NamedSharding:
            names: list[str | None] = [None] * (max(sequence, row) + 1)
            if sequence >= 0:
                names[sequence] = "data"
            if row >= 0 and not is_token:
                names[row] = "sequence"
            return self.sharding(*names)

        return jax.tree.map(sharding, by_sequence, self.rows_of_walk(policy))

    def rows_of_walk(self, policy: Policy) -> PyTree:
        """The axis of rows of every array of the state that crosses layers; -1 without one."""
        make = functools.partial(policy.init_walk, batch=1, num_blocks=1)
        return _growing_axes(lambda: make(num_rows=1), lambda: make(num_rows=2))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The sharding of an array by the name of a mesh axis for each of its own.

        Args:
          *axes: Names, of which those that the mesh lacks, or has at 1, spread nothing.
        """
        names = [name if name and self.size(name) > 1 else None for name in axes]
        while names and names[-1] is None:
            names.pop()
        return NamedSharding(self.mesh, PartitionSpec(*names))

    # What follows from it.

    def layer_shape(self, policy: Policy, dtype: DTypeLike = jnp.float32) -> LayerShape:
        """The sizes for which a policy lays out its statistics."""
        c = self.model_config
        kv_heads = c.num_kv_heads if policy.heads_on_mesh == "all" else self.num_kv_heads
        return LayerShape(c.num_heads, kv_heads, c.head_dim, dtype)

    def num_blocks(self, wanted: int) -> int:
        """Blocks of a cache with room for so many: ranks of `sequence` have as many each."""
        return wanted + -wanted % self.size("sequence")

    def check_policy(self, policy: Policy) -> None:
        """Raises for a policy that cannot select where the blocks of a sequence are spread."""
        if self.size("sequence") > 1 and policy.blocks_on_mesh == "none":
            raise NotImplementedError(
                f"the mesh's sequence axis must be 1 for {type(policy).__name__}, which selects "
                f"with all queries and keys of a sequence at hand, got {self.size('sequence')}; "
                f"put its devices on data or tensor, or use a policy with blocks_on_mesh, such as "
                f"SketchWalkConfig.recommended() or Dense()"
            )

    def check_batch(self, batch: int) -> None:
        """Raises unless `data` divides a number of sequences."""
        ranks = self.size("data")
        if batch % ranks:
            raise ValueError(
                f"the mesh's data axis must divide the number of sequences, got {batch} sequences "
                f"for {ranks} ranks; pad the batch to {batch + -batch % ranks}, or make the axis "
                f"smaller"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What this placement costs that a smaller `tensor` axis would not."""
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
        """Sizes of the axes, and the notes."""
        axes = ", ".join(f"{name}={self.size(name)}" for name in AXES if self.size(name) > 1)
        return "; ".join([f"Placement({axes or 'one device'})", *self.notes])


def place(mesh: Mesh | AbstractMesh, model_config: ModelConfig) -> Placement:
    """Where parameters, cache, statistics and tokens of a model lie on a mesh.

    Over `tensor`, each rank has `N / tensor` query heads with their key/value heads, a share of
    the mlp's columns and of the vocabulary. Key/value heads fewer than ranks are replicated: each
    then lies on `tensor / K` ranks, whose caches hold one head each, so that beyond `K` ranks more
    of them make attention faster and caches no smaller (`Placement.notes` says so). A vocabulary
    that does not divide is replicated as well. Over `data`, each rank has a share of the sequences;
    over `sequence`, of the tokens of each, in prefill and in the cache: calls pad a prompt to `2 ·
    sequence` times as many blocks, and a cache to `sequence` times as many, so any number divides.

    Args:
      mesh: Axes among `data`, `sequence` and `tensor`, any of which may be missing, of type Auto
        (`jax.make_mesh` makes Explicit ones unless it is told).
      model_config: The model.

    Returns:
      A `Placement`, for `load(sharding=...)` and `init_cache(sharding=...)`.

    Raises:
      ValueError: If the mesh has other axes, or sizes do not divide; says what would.

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


def plan(mesh: Mesh | AbstractMesh, model_config: ModelConfig) -> Placement:
    """Former name of `place`; warns."""
    warn_renamed("sharding.plan is now called sharding.place")
    return place(mesh, model_config)


@functools.lru_cache(maxsize=64)
def _placement(mesh: Mesh | AbstractMesh, model_config: ModelConfig) -> Placement | None:
    if mesh.empty or mesh.size == 1 or not set(mesh.axis_names) <= set(AXES):
        return None
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return place(mesh, model_config)


def placement_of(params: PyTree, model_config: ModelConfig) -> Placement | None:
    """The placement that parameters have been loaded with; `None` on one device.

    An array says on which mesh it lies, under `jit` too; where everything lies on it follows from
    the mesh and the model. Parameters on a mesh with other axes have none: XLA partitions all that
    is computed from them, selection and attention included, as it sees fit.

    Args:
      params: Parameter tree.
      model_config: The model.

    Raises:
      ValueError: If the mesh does not fit the model.
    """
    try:
        embedding = params["embed"]["embedding"]
    except (KeyError, TypeError, IndexError):  # whoever checks parameters says what is wrong
        return None
    if isinstance(embedding, jax.core.Tracer):
        return _placement(jax.typeof(embedding).sharding.mesh, model_config)
    sharding = getattr(embedding, "sharding", None)
    return _placement(sharding.mesh, model_config) if isinstance(sharding, NamedSharding) else None


def lies_on_one_device(params: PyTree) -> bool:
    """Whether parameters are known to lie on one device, whatever others this process has.

    Under a `jit` of the caller's that is unknown, unless there is only one.

    Args:
      params: Parameter tree.
    """
    if jax.device_count() == 1:
        return True
    if any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(params)):
        return False
    return len(devices_of(params)) == 1


def devices_of(params: PyTree) -> set[jax.Device]:
    """The devices that arrays lie on; NumPy's lie on none.

    Args:
      params: Parameter tree.
    """
    arrays = [one for one in jax.tree.leaves(params) if isinstance(one, jax.Array)]
    return set[jax.Device]().union(*(one.devices() for one in arrays))


def constrain(x: PyTree, placement: Placement | None, *axes: str | None) -> PyTree:
    """Arrays that are spread by the names of mesh axes; as they are where there is no mesh.

    Args:
      x: Arrays, each with at least as many axes.
      placement: The placement, if there is one.
      *axes: As for `Placement.sharding`.
    """
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, placement.sharding(*axes))


def embed_tokens(
    params: PyTree, tokens: Int[Array, "B T"], placement: Placement | None
) -> Float[Array, "B T D"]:
    """`embed`; on a mesh each rank looks up the tokens whose embeddings it has.

    Left to itself, XLA would gather the whole table for a batch of one token. Sequences and tokens
    are spread over the axes that divide them.

    Args:
      params: Parameter tree.
      tokens: Token ids, those of a prompt as `Blocks.deal` lays them out; those outside the
        vocabulary are clamped.
      placement: The placement, if there is one.
    """
    if placement is None:
        return embed(params, tokens)
    table, ranks = params["embed"]["embedding"], placement.size("tensor")
    axes = [
        axis if size % placement.size(axis) == 0 else None
        for axis, size in zip(("data", "sequence"), tokens.shape, strict=True)
    ]
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
    """Hidden states of some tokens, whose ranks add them to the zeros of the others.

    Left to itself, XLA would gather those of all tokens.

    Args:
      hidden: Of all tokens, as `Blocks.deal` lays them out.
      columns: The columns that are wanted, of such a layout.
      placement: The placement, whose `sequence` is more than 1.
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
    weights: dict[str, Float[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "L D"] | None,
    eps: float,
    placement: Placement,
    kernels: KernelConfig,
    is_transposed: bool = False,
) -> list[Float[Array, "B T _"]] | None:
    """`linear_of_rows` with what each rank has of the weights.

    A rank has some of the columns, and so of the results; or, of weights whose inputs are spread,
    those of its own inputs, and ranks add up what these give. The kernel reads a rank's weights
    where they lie, as on one device.

    Args:
      x: The input.
      weights: Of all layers, by name, heads and their features as one axis.
      layer: The layer.
      scale: Of the norm that the input goes through first, of all layers, if there is one.
      eps: Of the norm.
      placement: Where the weights lie.
      kernels: What the kernel may run with.
      is_transposed: Whether weights are `[L, F, D]`.
    """
    ranks, c = placement.size("tensor"), placement.model_config
    of_inputs = set(weights) <= _INPUTS_SPREAD and ranks > 1
    axis = 1 if of_inputs or is_transposed else 2

    def is_whole(name: str) -> bool:
        by_keys = name in ("key", "value") and c.num_kv_heads % ranks != 0
        return by_keys or (name in ("embed", "lm_head") and c.vocab_size % ranks != 0)

    of_weights, of_results = [], []
    for name in weights:
        spread = None if is_whole(name) else "tensor"
        of_weights.append(placement.sharding(*[None] * axis, spread))
        of_results.append(placement.sharding("data", None, None if of_inputs else spread))
    of_x = placement.sharding("data", None, "tensor" if of_inputs else None)
    own = [
        jax.ShapeDtypeStruct(sharding.shard_shape(one.shape), one.dtype)
        for sharding, one in zip(of_weights, weights.values(), strict=True)
    ]
    batch, tokens, width = of_x.shard_shape(x.shape)
    rows = jax.ShapeDtypeStruct((batch * tokens, width), x.dtype)
    # Pallas takes long to import, and few callers need it.
    from sketchwalk_jax.pallas_kernels.linear import why_not_linear

    if why_not_linear(rows, own, scale, is_transposed=is_transposed):
        return None

    def on_rank(x: Array, stacks: list[Array], layer: Array, scale: Array | None) -> list[Array]:
        # By name again: in a tree names are sorted.
        own = dict(zip(weights, stacks, strict=True))
        found = linear_of_rows(
            x, own, layer, scale=scale, eps=eps, kernels=kernels, is_transposed=is_transposed
        )
        assert found is not None  # as was asked above
        return [jax.lax.psum(one, "tensor") for one in found] if of_inputs else found

    return jax.shard_map(
        on_rank,
        mesh=placement.mesh,
        in_specs=(of_x.spec, specs(of_weights), PartitionSpec(), PartitionSpec()),
        out_specs=specs(of_results),
        check_vma=False,
    )(x, list(weights.values()), layer, scale)


def constrain_logits(
    logits: Float[Array, "B *T V"], placement: Placement | None
) -> Float[Array, "B *T V"]:
    """Logits of all tokens spread over `tensor` too; those of one token whole, to be drawn from.

    Args:
      logits: From `unembed`.
      placement: The placement, if there is one.
    """
    if placement is None:
        return logits
    axes = ["data"] + [None] * (logits.ndim - 2)
    if logits.shape[-1] % placement.size("tensor") == 0:
        # Said first, so that logits are gathered, and not the output head.
        logits = constrain(logits, placement, *axes, "tensor")
    return constrain(logits, placement, *axes) if logits.ndim == 2 else logits


def on_every_rank(
    function: Callable[..., PyTree], placement: Placement | None
) -> Callable[..., PyTree]:
    """A function of arrays that every rank calls with all of them, for what ranks do not share.

    Left to itself, XLA would partition it, which it cannot where the function launches kernels.

    Args:
      function: Takes arrays in any trees, and closes over none; what it finds is the same on every
        rank.
      placement: The placement, if there is one; without, the function is returned as it is.
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
    """The partition specs of shardings, as `jax.shard_map` takes them."""
    return jax.tree.map(lambda one: one.spec, shardings)


def _growing_axes(small: Callable[[], PyTree], large: Callable[[], PyTree]) -> PyTree:
    """For every array, the axis in which two of its shapes differ; -1 where none does."""

    def axis(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> int:
        differ = [a != b for a, b in zip(one.shape, other.shape, strict=True)]
        return differ.index(True) if any(differ) else -1

    return jax.tree.map(axis, jax.eval_shape(small), jax.eval_shape(large))


def _fits(ranks: int, model_config: ModelConfig) -> bool:
    """Whether so many ranks divide heads and columns of the mlp."""
    c = model_config
    by_kv = c.num_kv_heads % ranks == 0 or ranks % c.num_kv_heads == 0
    return by_kv and c.num_heads % ranks == 0 and c.intermediate_size % ranks == 0
