"""Mixture of experts: a router chooses a few of many gated mlps for each token.

With E experts, of which a token chooses k, and router weights W::

    p[t]    = softmax(W x[t])                       float32
    C(t)    = the k experts with the largest p[t], the first ones of equals
    w[t, e] = p[t, e] / Σ_{c ∈ C(t)} p[t, c]        with norm_topk_prob, else p[t, e]
    y[t]    = Σ_{e ∈ C(t)} w[t, e] · down_e(silu(gate_e(x[t])) · up_e(x[t]))

Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), as in Qwen3's technical
report (arXiv:2505.09388).

A *pair* is a token and one of its experts. Pairs are sorted by expert, and put into groups of at
most R pairs with one expert each; few pairs are groups of their own. So memory is linear in tokens,
and what a token gets does not depend on the other tokens. Kernels and CPUs skip experts that nobody
chooses, except that for a prompt, a layer's 8-bit weights are dequantised all together.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.xla import vary_alike
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.norm import rms_norm
from sketchwalk_jax.models.params import EXPERTS, QUANTIZED
from sketchwalk_jax.models.quantized import refuse_gradients
from sketchwalk_jax.pallas_kernels.config import GROUP_ROWS, KernelConfig
from sketchwalk_jax.pallas_kernels.decode_matmul.api import choose_decode_matmul
from sketchwalk_jax.pallas_kernels.decode_matmul.groups import Groups
from sketchwalk_jax.pallas_kernels.expert_matmul.api import (
    choose_experts,
    grouped_matmul,
    grouped_swiglu,
    why_not_grouped_matmul,
)
from sketchwalk_jax.precision import matmul_precision

PyTree = Any
NAMES = EXPERTS[1:]
"""The matrices of an expert: gate, up and down."""
FEW_PAIRS = 256
"""Most pairs for the decode matmul kernels, whose groups are small: with more pairs, an expert has
several groups, and each one would read its weights again."""
FEW_ROWS = 8
"""Most pairs in a group for these kernels."""
MOST_TOKENS = 2**15
"""Most tokens that kernels multiply at a time, to bound the memory of their pairs. More parts would
read the weights more often, and pad more groups: in each part, an expert's last group is padded."""


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """Pairs of a token and an expert in groups of one expert each.

    Attributes:
      pair: The pair in each place of each group, `t k + j` for choice `j` of token `t`; the number
        of pairs in an empty place.
      expert: Expert of each group.
      used: Number of groups that are computed; they come first.
      place: Place of each pair, `g R + r`; `G R` for a pair that is in no group.
    """

    pair: Int[Array, "G R"]
    expert: Int[Array, "G"]
    used: Int[Array, ""]
    place: Int[Array, "P"]


jax.tree_util.register_dataclass(ExpertGroups)


def route(
    x: Float[Array, "T D"],
    router: Float[Array, "L D E"],
    layer: Int[Array, ""],
    *,
    model_config: ModelConfig,
    kernel_config: KernelConfig | None,
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Chooses the experts of each token.

    Args:
      x: The normalised input.
      router: Weights of the routers of all layers.
      layer: Index of the layer among those with experts.
      model_config: The model.
      kernel_config: Settings of the decode matmul kernel, or `None` for XLA.

    Returns:
      The weights `w` in float32, and the experts; the largest weight comes first.

    Example:
      >>> config = ModelConfig(model_type="qwen3_moe", vocab_size=64, num_layers=1, hidden_size=4,
      ...                      intermediate_size=8, num_heads=2, num_kv_heads=2, head_dim=2,
      ...                      max_position_embeddings=64, num_experts=4, experts_per_token=2,
      ...                      expert_intermediate_size=2)
      >>> x, router = jnp.array([[1.0, 0.0, 2.0, 0.0]]), jnp.eye(4)[None]
      >>> weights, experts = route(
      ...     x, router, jnp.array(0), model_config=config, kernel_config=None
      ... )
      >>> [f"{weight:.2f}" for weight in weights[0]], experts.tolist()  # softmax of 1, 0, 2, 0
      (['0.61', '0.22'], [[2, 0]])
    """
    kernel = choose_decode_matmul(are_quantized=False)
    if kernel_config is not None and not kernel.why_not(x, [router], None):
        (logits,) = kernel.multiply(x, [router], layer, interpret=kernel_config.interpret)
    else:
        logits = jnp.einsum(
            "td,de->te",
            x,
            jax.lax.dynamic_index_in_dim(router, layer, keepdims=False),
            precision=matmul_precision(x),
            preferred_element_type=jnp.float32,
        )
    chosen, experts = jax.lax.top_k(logits, model_config.experts_per_token)
    most = jax.lax.stop_gradient(chosen[:, :1])
    weights = jnp.exp(chosen - most)
    if model_config.norm_topk_prob:  # the sum over all experts cancels
        total = functools.reduce(jnp.add, weights.T)
    else:
        total = jnp.sum(jnp.exp(logits - most), axis=-1)
    return weights / total[:, None], experts


def group_size(num_pairs: int, num_experts: int, *, has_kernels: bool = False) -> int:
    """Chooses R: the average number of pairs of an expert, rounded up to a power of two.

    Kernels multiply groups of at most `FEW_ROWS` or of exactly `GROUP_ROWS` rows.

    Example:
      >>> [group_size(8 * tokens, 128) for tokens in (1, 100, 100_000)]
      [1, 8, 128]
    """
    if has_kernels and num_pairs > FEW_PAIRS:
        return GROUP_ROWS
    most = FEW_ROWS if has_kernels else GROUP_ROWS
    return min(most, 1 << (-(-num_pairs // num_experts) - 1).bit_length())


def group_pairs(experts: Int[Array, "P"], *, num_experts: int, size: int) -> ExpertGroups:
    """Sorts pairs into groups.

    Args:
      experts: Expert of each pair; `num_experts` for pairs that belong to no token.
      num_experts: Number of experts.
      size: Places in a group, R.

    Returns:
      The groups. There are `min(P, P / R + E)` of them, enough for any choice.

    Example:
      >>> found = group_pairs(jnp.array([1, 0, 1, 1]), num_experts=2, size=2)
      >>> found.pair.tolist(), found.expert.tolist(), int(found.used)
      ([[1, 4], [0, 2], [3, 4], [4, 4]], [0, 1, 1, 1], 3)
    """
    pairs = experts.shape[0]
    number = jnp.arange(pairs, dtype=jnp.int32)
    if size == 1:  # do not sort: that takes many launches on a GPU, in every layer of every token
        is_routed = experts < num_experts
        return ExpertGroups(
            pair=jnp.where(is_routed, number, pairs)[:, None],
            expert=jnp.minimum(experts, num_experts - 1),
            used=jnp.full_like(experts, pairs, shape=()),
            place=jnp.where(is_routed, number, pairs),
        )
    num_groups = min(pairs, pairs // size + num_experts)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    sorted_experts = experts[order]
    every = jnp.arange(num_experts, dtype=experts.dtype)
    counts = jnp.sum(experts[:, None] == every[None], axis=0, dtype=jnp.int32)
    own_groups = (counts + size - 1) // size
    ends = jnp.cumsum(own_groups, dtype=jnp.int32)  # groups up to each expert
    # How far each expert's pairs move from the sorted order to their groups.
    moved = (ends - own_groups) * size - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    place = number + moved.at[sorted_experts].get(mode="clip")
    place = jnp.where(sorted_experts < num_experts, place, num_groups * size)
    pair = jnp.full(num_groups * size, pairs, jnp.int32)
    pair = pair.at[place].set(order, mode="drop")
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    expert = jnp.sum(ends[None] <= groups[:, None], axis=1, dtype=jnp.int32)
    return ExpertGroups(
        pair=pair.reshape(num_groups, size),
        expert=jnp.minimum(expert, num_experts - 1),
        used=ends[-1],
        place=jnp.zeros(pairs, jnp.int32).at[order].set(place, unique_indices=True),
    )


def num_parts(number: int, most: int) -> int:
    """Returns the least number of equal parts of at most `most`; prompts are multiples of a block.

    Example:
      >>> num_parts(4, 4), num_parts(9, 4)
      (1, 3)
    """
    return next(n for n in range(-(-number // most), number + 1) if number % n == 0)


def mixture(
    x: Float[Array, "B T D"],
    is_token: Bool[Array, "B T"] | None,
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    *,
    model_config: ModelConfig,
    kernel_config: KernelConfig | None = None,
    axis_name: str | None = None,
    scale: Float[Array, "D"] | None = None,
) -> Float[Array, "B T D"]:
    """Computes `y` of the module docstring.

    Args:
      x: The input, normalised unless there is a `scale`.
      is_token: Whether a row is a token; other rows choose no expert and get 0. `None` for all.
      stacks: Parameters of all layers.
      layer: Index of the layer among those with experts.
      model_config: The model.
      kernel_config: Settings of the kernels, or `None` for XLA.
      axis_name: Under `shard_map`, the mesh axis whose ranks share the width M of each expert; they
        sum their results in float32. `None` if this rank has whole experts.
      scale: Scale of the norm that the input goes through first, or `None` for no norm.

    Returns:
      `y` in the type of `x`.

    Raises:
      NotImplementedError: If gradients are taken through 8-bit weights.

    Example:
      >>> config = ModelConfig(model_type="qwen3_moe", vocab_size=64, num_layers=1, hidden_size=4,
      ...                      intermediate_size=8, num_heads=2, num_kv_heads=2, head_dim=2,
      ...                      max_position_embeddings=64, num_experts=3, experts_per_token=2,
      ...                      expert_intermediate_size=4, norm_topk_prob=True)
      >>> stacks = {"router": {"kernel": jnp.zeros((1, 4, 3))}}
      >>> stacks |= dict.fromkeys(NAMES, {"kernel": jnp.ones((1, 3, 4, 4))})
      >>> is_token = jnp.array([[True, False]])
      >>> out = mixture(jnp.ones((1, 2, 4)), is_token, stacks, jnp.array(0), model_config=config)
      >>> [f"{y:.1f}" for y in out[0, :, 0]]  # 4 · silu(4) · 4, and no token
      ['62.8', '0.0']
    """
    count, k = model_config.num_experts, model_config.experts_per_token
    # These kernels have no derivative, and prompts may be differentiated.
    step = kernel_config if x.shape[1] == 1 else None
    has_kernels = kernel_config is not None
    if step is not None and group_size(k * len(x), count, has_kernels=True) == 1:
        mask = None if is_token is None else is_token[:, 0]
        sizes: dict[str, Any] = {"kernel_config": step, "model_config": model_config}
        alone = _sum_of_single_pairs(x[:, 0], mask, stacks, layer, scale=scale, **sizes)
        if alone is not None:
            alone = alone if axis_name is None else jax.lax.psum(alone, axis_name)
            return alone.astype(x.dtype)[:, None]
    if scale is not None:
        x = rms_norm(x, scale, eps=model_config.rms_norm_eps)
    rows = x.reshape(-1, x.shape[-1])
    router = stacks["router"]["kernel"]
    options: dict[str, Any] = {"model_config": model_config, "kernel_config": step}
    weights, experts = route(rows, router, layer, **options)
    if is_token is not None:
        experts = jnp.where(is_token.reshape(-1, 1), experts, count)
    own = {name: stacks[name] for name in NAMES}
    if kernel_config is not None and k * len(rows) > FEW_PAIRS and "quantized" in own[NAMES[0]]:
        gate = own[NAMES[0]]["quantized"]
        arrays = [(1, GROUP_ROWS, x.shape[-1]), (1, *gate.shape[2:])]
        like = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in arrays]
        options = {"is_transposed": True, "interpret": kernel_config.interpret}
        if why_not_grouped_matmul(*like, **options) is None:
            own, layer = _dequantize(own, layer, x.dtype)

    def run(rows: Array, weights: Array, experts: Array) -> Array:
        size = group_size(experts.size, count, has_kernels=has_kernels)
        groups = group_pairs(experts.reshape(-1), num_experts=count, size=size)
        found = _sum_of_groups(kernel_config, *vary_alike(rows, weights, own, layer, groups))
        if axis_name is not None:
            found = jax.lax.psum(found, axis_name)
        return found.astype(rows.dtype)

    parts = num_parts(len(rows), MOST_TOKENS) if has_kernels else 1
    if parts == 1:
        return run(rows, weights, experts).reshape(x.shape)
    split = [one.reshape(parts, -1, one.shape[1]) for one in (rows, weights, experts)]
    return jax.lax.map(lambda one: run(*one), tuple(split)).reshape(x.shape)


def _sum_of_single_pairs(
    x: Float[Array, "T D"],
    is_token: Bool[Array, "T"] | None,
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "D"] | None,
    model_config: ModelConfig,
    kernel_config: KernelConfig,
) -> Float[Array, "T D"] | None:
    """Computes `y` of so few tokens that each pair is a group, or `None` without kernels for it.

    On a GPU, a launch costs as much as the router's product: nothing is sorted, and rows are not
    copied for each of their experts. Rows are multiplied by the norm's scale only. The root, which
    one kernel computes along with the choice, divides sums. In float16 these products could
    overflow, so other kernels take rows that are normalised first.
    """
    if scale is not None and x.dtype == jnp.float16:
        return None
    k, rows = model_config.experts_per_token, x
    if scale is not None:
        rows = (x.astype(jnp.float32) * scale[None].astype(jnp.float32)).astype(x.dtype)
    chosen = choose_experts(
        x,
        rows,
        stacks["router"]["kernel"],
        layer,
        is_token,
        chosen=k,
        eps=None if scale is None else model_config.rms_norm_eps,
        sums_chosen=model_config.norm_topk_prob,
        kernel_config=kernel_config,
    )
    if chosen is None:
        return None
    weights, matrix, root = chosen
    matrices = Groups(matrix.reshape(-1), jnp.full((), matrix.size, jnp.int32))
    roots = None if scale is None else jnp.repeat(root, k)[:, None, None]
    own = {name: stacks[name] for name in NAMES}
    found = _multiply_few(kernel_config, rows[:, None], own, matrices, roots)
    if found is None:
        return None
    total = _weigh(weights, found.reshape(*weights.shape, -1))
    return total if is_token is None else jnp.where(is_token[:, None], total, 0)


def _weigh(weights: Float[Array, "T k"], found: Float[Array, "T k D"]) -> Float[Array, "T D"]:
    """Adds up weighted outputs. Written out, the sum needs no launch of its own on a GPU."""
    each = [weights[:, j, None] * found[:, j] for j in range(weights.shape[1])]
    return functools.reduce(jnp.add, each)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_groups(
    kernel_config: KernelConfig | None,
    x: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    groups: ExpertGroups,
) -> Float[Array, "T D"]:
    """Sums the weighted outputs of a token's experts in float32; XLA takes ascending experts."""
    if kernel_config is not None:
        found = _sum_with_kernels(kernel_config, x, weights, stacks, layer, groups)
        if found is not None:
            return found

    def add(index: Array, total: Array) -> Array:
        token, rows, own_weights, own = _take(index, x, weights, stacks, layer, groups)
        return total.at[token].add(_of_one_expert(rows, own_weights, own), mode="drop")

    return jax.lax.fori_loop(0, _count(groups), add, jnp.zeros_like(x, jnp.float32))


def _sum_with_kernels(
    kernel_config: KernelConfig,
    x: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    groups: ExpertGroups,
) -> Float[Array, "T D"] | None:
    """Computes `_sum_of_groups` with kernels, or returns `None` if there are none for the input."""
    k = weights.shape[1]
    rows = x.at[groups.pair // k].get(mode="fill", fill_value=0)
    if groups.pair.shape[1] <= FEW_ROWS:
        count = jax.tree.leaves(stacks)[0].shape[1]
        matrices = Groups(layer * count + groups.expert, groups.used)
        found = _multiply_few(kernel_config, rows, stacks, matrices)
    else:
        found = _multiply_many(kernel_config, rows, stacks, layer, groups)
    if found is None:
        return None
    # Groups that are not used are undefined, and no pair has its place there.
    found = found.reshape(-1, found.shape[-1]).at[groups.place].get(mode="fill", fill_value=0)
    found = found.reshape(*weights.shape, -1).astype(jnp.float32)
    return _weigh(weights, found)


def _multiply_few(
    kernel_config: KernelConfig,
    rows: Float[Array, "N R D"],
    stacks: Mapping[str, PyTree],
    matrices: Groups,
    roots: Float[Array, "G 1 1"] | None = None,
) -> Float[Array, "G R D"] | None:
    """Runs the experts of few pairs; the kernel reads the weights of chosen experts in place.

    With `roots`, these are still to be multiplied with the products of `rows`.
    """
    is_quantized = "quantized" in stacks[NAMES[0]]
    kernel = choose_decode_matmul(are_quantized=is_quantized)

    def arguments(names: tuple[str, ...]) -> tuple[list[Array], dict[str, Any]]:
        flat = [jax.tree.map(_join_stack, stacks[name]) for name in names]
        if not is_quantized:
            return [one["kernel"] for one in flat], {}
        scales = [one["scales"] for one in flat]
        return [one["quantized"] for one in flat], {"is_transposed": True, "weight_scales": scales}

    wide, wide_options = arguments(NAMES[:2])
    narrow, narrow_options = arguments(NAMES[2:])
    width = narrow[0].shape[2 if is_quantized else 1]
    like = jax.ShapeDtypeStruct((len(matrices.matrix), rows.shape[1], width), rows.dtype)
    if kernel.why_not(rows, wide, None, **wide_options) or kernel.why_not(
        like, narrow, None, **narrow_options
    ):
        return None
    interpret = kernel_config.interpret
    gate, up = kernel.multiply(rows, wide, matrices, interpret=interpret, **wide_options)
    if roots is not None:
        gate, up = gate * roots, up * roots
    hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
    return kernel.multiply(hidden, narrow, matrices, interpret=interpret, **narrow_options)[0]


def _multiply_many(
    kernel_config: KernelConfig,
    rows: Float[Array, "G R D"],
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    groups: ExpertGroups,
) -> Float[Array, "G R D"] | None:
    """Runs the experts of a prompt."""
    is_transposed = "quantized" in stacks[NAMES[0]]  # dequantised, with scales of one
    part = "quantized" if is_transposed else "kernel"
    gate, up, down = (_join_stack(stacks[name][part]) for name in NAMES)
    matrix = groups.expert + layer * stacks[NAMES[0]][part].shape[1]
    options: dict[str, Any] = {"kernel_config": kernel_config, "is_transposed": is_transposed}
    hidden = grouped_swiglu(rows, gate, up, matrix, groups.used, **options)
    return None if hidden is None else grouped_matmul(hidden, down, matrix, groups.used, **options)


def _join_stack(x: Array) -> Array:
    """Joins the axes of layers and experts."""
    return x.reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dequantize(
    stacks: Mapping[str, PyTree], layer: Int[Array, ""], dtype: DTypeLike
) -> tuple[dict[str, PyTree], Int[Array, ""]]:
    """Returns a layer's weights with scales of one, as stacks of one layer; and its index there.

    The kernel for prompts multiplies 16 bits.
    """
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=layer, slice_size=1)
    found = {}
    for name, stack in stacks.items():
        quantized, scales = (take(stack[part]) for part in QUANTIZED)
        wide = quantized.astype(jnp.float32) * scales[..., None]
        found[name] = {"quantized": wide.astype(dtype), "scales": jnp.ones_like(scales)}
    return found, jnp.zeros_like(layer)


_dequantize.defvjp(refuse_gradients, refuse_gradients)


def _count(groups: ExpertGroups) -> Int[Array, ""]:
    """Groups to visit: on a GPU all, since a loop of unknown length waits for the host."""
    return jax.lax.platform_dependent(
        groups.used,
        cpu=lambda used: used,
        default=lambda used: jnp.full_like(used, len(groups.expert)),
    )


def _take(
    index: Array,
    x: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    stacks: Mapping[str, PyTree],
    layer: Int[Array, ""],
    groups: ExpertGroups,
) -> tuple[Int[Array, "R"], Float[Array, "R D"], Float[Array, "R"], PyTree]:
    """Takes a group's tokens (their number for empty places), rows, weights, and its expert."""
    pair, expert = groups.pair[index], groups.expert[index]
    token = pair // weights.shape[1]
    rows = x.at[token].get(mode="fill", fill_value=0)
    own_weights = weights.reshape(-1).at[pair].get(mode="fill", fill_value=0)
    return token, rows, own_weights, jax.tree.map(lambda one: one[layer, expert], stacks)


def _of_one_expert(
    rows: Float[Array, "R D"], weights: Float[Array, "R"], own: Mapping[str, PyTree]
) -> Float[Array, "R D"]:
    """Computes `w · down(silu(gate(x)) · up(x))` in float32 for the rows of one expert."""
    gate, up = (_multiply(rows, own[name]) for name in NAMES[:2])
    hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
    return weights[:, None] * _multiply(hidden, own[NAMES[2]])


def _multiply(rows: Float[Array, "R D"], own: Mapping[str, Array]) -> Float[Array, "R F"]:
    """Multiplies rows by one matrix, in float32. Inputs of 8-bit weights are not rounded."""
    einsum = functools.partial(
        jnp.einsum, precision=matmul_precision(rows), preferred_element_type=jnp.float32
    )
    if "kernel" in own:
        return einsum("rd,df->rf", rows, own["kernel"])
    quantized, scales = (own[name] for name in QUANTIZED)
    return einsum("rd,fd->rf", rows, quantized.astype(rows.dtype)) * scales[None]


def _sum_forward(kernel_config: KernelConfig | None, *arguments: Any) -> tuple[Array, Any]:
    return _sum_of_groups(kernel_config, *arguments), arguments


def _sum_backward(
    kernel_config: KernelConfig | None, arguments: Any, gradient: Float[Array, "T D"]
) -> tuple[Any, ...]:
    """Runs each expert again, and takes gradients group by group."""
    del kernel_config
    x, weights, stacks, layer, groups = arguments
    if "quantized" in stacks[NAMES[0]]:
        refuse_gradients()

    is_sorted = groups.pair.shape[1] > 1

    def add(index: Array, found: Any) -> Any:
        to_x, to_weights, to_stacks, sums = found
        token, rows, own_weights, own = _take(index, x, weights, stacks, layer, groups)
        _, pull = jax.vjp(_of_one_expert, rows, own_weights, own)
        of_rows, of_weights, of_own = pull(gradient.at[token].get(mode="fill", fill_value=0))
        expert = groups.expert[index]
        place = layer, expert
        if is_sorted:  # in float32, as an expert of a long prompt has many groups
            goes_on = (index > 0) & (groups.expert[jnp.maximum(index - 1, 0)] == expert)
            sums = jax.tree.map(
                lambda total, of: jnp.where(goes_on, total, 0) + of.astype(jnp.float32),
                sums,
                of_own,
            )
            to_stacks = jax.tree.map(
                lambda to, total: to.at[place].set(total.astype(to.dtype)), to_stacks, sums
            )
        else:
            to_stacks = jax.tree.map(lambda to, of: to.at[place].add(of), to_stacks, of_own)
        return (
            to_x.at[token].add(of_rows.astype(jnp.float32), mode="drop"),
            to_weights.at[groups.pair[index]].add(of_weights, mode="drop"),
            to_stacks,
            sums,
        )

    start = (
        jnp.zeros_like(x, jnp.float32),
        jnp.zeros_like(weights.reshape(-1)),
        jax.tree.map(jnp.zeros_like, stacks),
        jax.tree.map(lambda one: jnp.zeros_like(one[0, 0], jnp.float32), stacks),
    )
    to_x, to_weights, to_stacks, _ = jax.lax.fori_loop(0, _count(groups), add, start)
    return to_x.astype(x.dtype), to_weights.reshape(weights.shape), to_stacks, None, None


_sum_of_groups.defvjp(_sum_forward, _sum_backward)
