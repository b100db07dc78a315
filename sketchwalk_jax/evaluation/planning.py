"""Makes plans: measures on generated prompts what each layer loses at each density.

Two measurements make a layer's curve. The model runs densely while the recommended policy selects
in every layer at several densities from the same page scores; its output is compared with the dense
one and discarded, so one pass gives the shape of all curves. To weigh a layer's error, each layer
in turn is made sparse alone, at one density, and the model's predictions are compared.

On a mesh, ranks share the weights, but each attends with all heads to the whole prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import block_sparse_attention, dense_attention
from sketchwalk_jax.attention.mass import block_mass
from sketchwalk_jax.evaluation.measure import cache_for, compare_logits, compare_program
from sketchwalk_jax.evaluation.prompts import ANSWER_ROOM
from sketchwalk_jax.evaluation.tasks import draw_samples
from sketchwalk_jax.inference.cache import Cache, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.layer import select_whole
from sketchwalk_jax.inference.steps import read_into_new_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.quantized import out_kernel
from sketchwalk_jax.models.transformer import Attend, embed, run_layers, unembed
from sketchwalk_jax.plan import Loss, Plan
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import choose_mixture, on_every_rank, placement_of, whole_batch
from sketchwalk_jax.text.haystack import HELD_OUT, Text, draw_passages, prompt_rng, read_text
from sketchwalk_jax.validation import check_integer
from sketchwalk_jax.walk import WalkState

PyTree = Any
DENSITIES = (0.03, 0.06, 0.1, 0.15, 0.22, 0.35, 0.6)
REPRESENTATIVES = (4, 8, 16, 32)
TASKS = ("multi_key", "text_loss", "single_needle", "mid_prompt")
# The end of a prompt holds the question in few tokens: it counts as much as the rest.
_LAST_TOKENS = 64
# A plan's prompts may be short: with a larger minimum, all low densities would keep the same keys.
_LEAST_TOKENS = 256
LOSS_DENSITIES = (0.05, 0.1, 0.2, 0.4)
PASSAGES = 4
"""Texts of each length by which `measure_losses` is called."""


def make_plan(
    params: PyTree,
    prompts: Sequence[Int[np.ndarray, "_"]],
    *,
    model_config: ModelConfig,
    policy: RecommendedConfig | None = None,
    densities: Sequence[float] = DENSITIES,
    representatives: Sequence[int] = REPRESENTATIVES,
    fingerprint: str = "",
    after: Callable[[], object] = lambda: None,
) -> Plan:
    """Measures what each layer loses at each density.

        loss_l(d) = weight_l · error_l(d),   weight_l = KL_l / error_l(d_0)
        error_l(d) = mean_t ‖W_o (o_sparse,t - o_dense,t)‖² / ‖W_o o_dense,t‖²
        KL_l = mean_t KL(p_dense,t ‖ p_l,t), with layer l alone sparse, at the density d_0
        miss_l(R) = mean_i max_{j not in list i} max_{t in row i, h} share_{t, h}[j]

    in nats, where `p` is the distribution of the next token and `d` the measured density. Both
    means over tokens weigh the last 64 tokens by one half and the last two thirds of the prompt,
    where budgets are above a minimum of 256 keys, by the other. `share` is a softmax weight of
    dense attention, and list `i` is selected with `R` representative queries at `d_0`. `miss`
    complements the error, a mean that hardly shows a retrieval by one head for one token.

    Args:
      params: Parameter tree, on one device or on a mesh.
      prompts: Tokens of each prompt.
      model_config: The model.
      policy: The policy; `RecommendedConfig()` by default. Its density, `max_kl`, plan, dense
        layers and a `min_tokens` above 256 have no effect.
      densities: Nominal densities to try, ascending, in (0, 1).
      representatives: Numbers of representative queries to try in addition to the policy's own;
        numbers above the block size are skipped.
      fingerprint: Fingerprint of the checkpoint.
      after: Called after each prompt.

    Returns:
      The plan.

    Raises:
      ValueError: If there are no prompts, or one is shorter than ten blocks.

    Example:
      >>> plan = make_plan(params, prompts, model_config=model_config)  # doctest: +SKIP
      >>> policy = RecommendedConfig(density=0.1, plan=plan)  # doctest: +SKIP
    """
    policy = policy or RecommendedConfig()
    first, second = (min(one, _LEAST_TOKENS) for one in policy.least_tokens)
    policy = dataclasses.replace(
        policy,
        max_kl=None,
        min_tokens=(first, second),
        plan=None,
        num_layers=None,
        dense_layers=0,
        # All query blocks use the number under test.
        early_representatives=(),
    )
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    least = 10 * policy.block_size
    shortest = min(len(one) for one in prompts)
    if shortest < least:
        raise ValueError(f"prompts must have at least {least} tokens, got one of {shortest}")
    tried = tuple(dataclasses.replace(policy, density=one) for one in densities)
    middle = len(tried) // 3  # d_0: layers differ most clearly here
    counts = {policy.representatives, *(n for n in representatives if n <= policy.block_size)}
    shares, errors, damages, others = [], [], [], []
    room = -(-max(map(len, prompts)) // policy.block_size) * policy.block_size
    for prompt in prompts:
        tokens = jnp.asarray(np.pad(prompt, (0, room - len(prompt)))[None], jnp.int32)
        length = jnp.array([len(prompt)], jnp.int32)
        columns = jnp.asarray(_watched_columns(len(prompt)), jnp.int32)
        static: dict[str, Any] = {"model_config": model_config}
        measured = _losses(
            params,
            tokens,
            length,
            tried=tried,
            middle=middle,
            counts=tuple(sorted(counts)),
            **static,
        )
        pairs, lost, by_count = (np.asarray(one, np.float64) for one in measured)
        shares.append(pairs / (len(prompt) * (len(prompt) + 1) / 2))
        errors.append(lost)
        others.append(by_count)
        damage = partial(_outcome, params, tokens, length, columns, policy=tried[middle], **static)
        dense = damage(jnp.asarray(-1))
        layers = range(model_config.num_layers)
        damages.append([float(_divergence(dense, damage(jnp.asarray(i)))) for i in layers])
        after()
    mean_shares, mean_errors = np.mean(shares, axis=0), np.mean(errors, axis=0)  # [L, D]
    reference = np.maximum(mean_errors[:, middle], 1e-12)
    curves = [_ascending(*curve) for curve in zip(mean_shares, mean_errors, strict=True)]
    return Plan(
        densities=tuple(x for x, _ in curves),
        errors=tuple(y for _, y in curves),
        weights=_rounded(np.mean(damages, axis=0) / reference),
        representatives=tuple(sorted(counts)),
        misses=tuple(map(_rounded, np.mean(others, axis=0))),
        fingerprint=fingerprint,
    )


def _rounded(values: Float[np.ndarray, "D"]) -> tuple[float, ...]:
    return tuple(float(f"{one:.4g}") for one in values)


def _watched_columns(length: int) -> Int[np.ndarray, "C"]:
    """Chooses the last tokens of a prompt, and as many spread over its last two thirds."""
    last = np.arange(length - _LAST_TOKENS, length)
    return np.concatenate([np.linspace(length // 3, last[0] - 1, _LAST_TOKENS).astype(int), last])


@partial(jax.jit, static_argnames=("policy", "model_config"))
def _outcome(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    length: Int[Array, "1"],
    columns: Int[Array, "C"],
    sparse_layer: Int[Array, ""],
    *,
    policy: RecommendedConfig,
    model_config: ModelConfig,
) -> Float[Array, "C V"]:
    """Computes next-token log-probabilities after some columns with one sparse layer (-1: none)."""

    def of_layer(
        span: Span, query: Array, key: Array, value: Array, is_sparse: Array, walks: PyTree
    ) -> Any:
        length = span.end
        # Dense layers update the page scores too, as if all layers were sparse.
        ((lists, walk),) = select_whole([policy], query, key, walks, span=span)
        out = jax.lax.cond(
            is_sparse,
            lambda: block_sparse_attention(query, key, value, lists, kv_lengths=length),
            lambda: dense_attention(query, key, value, kv_lengths=length),
        )
        return out, [walk], None

    shared = on_every_rank(of_layer, placement_of(params, model_config))
    span = whole_prompt(tokens, length)

    def attend(query: Array, key: Array, value: Array, layer: Array, walks: PyTree) -> Any:
        return shared(span, query, key, value, layer == sparse_layer, walks)

    hidden, _ = run_prompt(params, tokens, attend, [policy], model_config=model_config)
    logits = unembed(params, hidden[0, columns], model_config=model_config)
    return jax.nn.log_softmax(logits, axis=-1)


def whole_prompt(tokens: Int[Array, "1 T"], length: Int[Array, "1"]) -> Span:
    """Makes the span of one prompt that is read in one piece."""
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return Span(jnp.zeros((1,), jnp.int32), column < length[:, None], length, length)


def run_prompt(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    attend: Attend,
    policies: Sequence[RecommendedConfig],
    *,
    model_config: ModelConfig,
) -> tuple[Float[Array, "1 T D"], PyTree]:
    """Runs all layers on one prompt with the policies' walks as state; returns output and aux."""
    num_blocks = tokens.shape[1] // policies[0].block_size
    hidden, _, found = run_layers(
        params,
        embed(params, tokens),
        jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :],
        [one.init_walk(batch=1, num_rows=num_blocks, num_blocks=num_blocks) for one in policies],
        model_config=model_config,
        layers=[(range(model_config.num_layers), attend)],
        mix=choose_mixture(placement_of(params, model_config)),
    )
    return hidden, found[0]


@jax.jit
def _divergence(dense: Float[Array, "C V"], sparse: Float[Array, "C V"]) -> Float[Array, ""]:
    """Computes `KL(dense ‖ sparse)` in nats, mean over columns."""
    return jnp.mean(jnp.sum(jnp.exp(dense) * (dense - sparse), axis=-1))


def _ascending(
    shares: Float[np.ndarray, "D"], errors: Float[np.ndarray, "D"]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Drops densities that a minimum budget makes equal, and makes losses non-increasing."""
    x, y = [float(round(shares[0], 5))], [float(errors[0])]
    for share, error in zip(shares[1:], errors[1:], strict=True):
        if share > x[-1] + 1e-3:
            x.append(float(round(share, 5)))
            y.append(min(y[-1], float(error)))
    return tuple(x), _rounded(np.array(y))


@partial(jax.jit, static_argnames=("tried", "middle", "counts", "model_config"))
def _losses(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    length: Int[Array, "1"],
    *,
    tried: tuple[RecommendedConfig, ...],
    middle: int,
    counts: tuple[int, ...],
    model_config: ModelConfig,
) -> tuple[Float[Array, "L D"], Float[Array, "L D"], Float[Array, "L R"]]:
    """Measures attended pairs and error of every layer for every policy on the same page scores.

    Also measures what policy `middle` misses with each number of representatives in `counts`.
    """
    policies = [dataclasses.replace(tried[middle], representatives=one) for one in counts]
    own = counts.index(tried[middle].representatives)
    size = tried[0].block_size

    def of_layer(
        span: Span, query: Array, key: Array, value: Array, kernel: Array, walks: PyTree
    ) -> Any:
        length = span.end
        last_page = (span.rows(size) + 1) * tried[0].pages - 1
        column = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :]
        first_query, num_queries = span.queries_of_rows(size)
        late = (column >= length[:, None] // 3) & span.valid
        last = (column >= length[:, None] - _LAST_TOKENS) & span.valid

        def squares(x: Float[Array, "1 T N H"]) -> Float[Array, "1 T"]:
            x = jnp.einsum("btnh,nhd->btd", x, kernel, preferred_element_type=jnp.float32)
            return jnp.sum(x * x, axis=-1)

        dense = dense_attention(query, key, value, kv_lengths=length)

        def measure(policy: RecommendedConfig, walk: WalkState) -> tuple[Array, Array]:
            lists = policy.keep(walk.scores, last_page, walk.layers, is_token=False)
            sparse = block_sparse_attention(query, key, value, lists, kv_lengths=length)
            share = squares(sparse - dense) / jnp.maximum(squares(dense), 1e-30)
            halves = [jnp.mean(share, where=one) for one in (late, last)]
            pairs = lists.attended_pairs(first_query, num_queries)[0]
            return pairs, 0.5 * (halves[0] + halves[1])

        walks = [walk for _, walk in select_whole(policies, query, key, walks, span=span)]
        pairs, errors = zip(*[measure(one, walks[own]) for one in tried], strict=True)
        shares = block_mass(query, key, block_size=size, kv_lengths=length, aggregate="max")
        misses = [
            _missed(
                shares, policy.keep(walk.scores, last_page, walk.layers, is_token=False), length
            )
            for policy, walk in zip(policies, walks, strict=True)
        ]
        return dense, walks, tuple(map(jnp.stack, (pairs, errors, misses)))

    shared = on_every_rank(of_layer, placement_of(params, model_config))
    span = whole_prompt(tokens, length)

    def attend(query: Array, key: Array, value: Array, layer: Array, walks: PyTree) -> Any:
        kernel = out_kernel(params, layer, query.dtype)
        return shared(span, query, key, value, kernel, walks)

    return run_prompt(params, tokens, attend, policies, model_config=model_config)[1]


def _missed(
    shares: Float[Array, "1 I J"], lists: BlockSelection, length: Int[Array, "1"]
) -> Float[Array, ""]:
    """Averages the largest share outside the list over query blocks; the last two weigh half.

    A block counts as listed if one of its pages is.
    """
    place = jnp.arange(lists.ids.shape[-1], dtype=jnp.int32)
    blocks = lists.ids[0, 0] // (lists.queries_per_row // lists.block_size)
    ids = jnp.where(place[None] < lists.counts[0, 0][:, None], blocks, shares.shape[-1])
    row = jnp.arange(shares.shape[1], dtype=jnp.int32)
    kept = shares[0].at[row[:, None], ids].set(0.0, mode="drop")
    missed = jnp.max(kept, axis=-1)
    end = (length[0] - 1) // lists.queries_per_row
    late, last = (row >= end // 3) & (row <= end), (row >= end - 1) & (row <= end)
    return 0.5 * (jnp.mean(missed, where=late) + jnp.mean(missed, where=last))


def measure_losses(
    params: PyTree,
    passages: Sequence[Int[np.ndarray, "_"]],
    *,
    model_config: ModelConfig,
    plan: Plan | None = None,
    densities: Sequence[float] = LOSS_DENSITIES,
    num_tokens: int,
    after: Callable[[], object] = lambda: None,
) -> tuple[Loss, ...]:
    """Measures what the whole model loses on texts, by phase and density.

        kl = mean_t KL(p_dense,t ‖ p_sparse,t)

    over the predictions of the last 64 tokens of each text. In phase `prefill` the whole text is
    read sparsely. In phase `decode` it is read densely up to these tokens, which are fed one by one
    and attend sparsely.

    Args:
      params: Parameter tree, on one device or on a mesh.
      passages: Tokens of each text, more than 64 and at most `num_tokens`.
      model_config: The model.
      plan: The plan by which layers share a density.
      densities: Densities of the recommended policy.
      num_tokens: Length that the losses are noted for.
      after: Called after each text.

    Returns:
      A loss for each phase and density.

    Raises:
      ValueError: If there are no texts, or one is too short or too long.
    """
    if not passages:
        raise ValueError("passages must hold at least one text, got none")
    for count in map(len, passages):
        if not _LAST_TOKENS < count <= num_tokens:
            raise ValueError(
                f"passages must have more than {_LAST_TOKENS} and at most {num_tokens} tokens, got "
                f"one of {count}"
            )
    where = placement_of(params, model_config)
    settings = partial(Settings, model_config=model_config, placement=where)
    plain = settings(policy=Dense())
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    room = -(-num_tokens // plain.policy.block_size) * plain.policy.block_size
    for passage in passages:
        rows = np.ones((whole_batch(1, where), 1), np.int32)  # all ranks get the same text
        tokens = jnp.asarray(rows * np.pad(passage, (0, room - len(passage))), jnp.int32)
        own = jnp.asarray(rows * passage[-_LAST_TOKENS:], jnp.int32)
        end = jnp.asarray(rows[:, 0] * (len(passage) - 1), jnp.int32)  # nothing follows the last
        start = end + 1 - _LAST_TOKENS
        columns = start[:, None] + jnp.arange(_LAST_TOKENS - 1, dtype=jnp.int32)[None]
        exact, _ = _read(params, tokens, end, columns, settings=plain)
        held: Cache | None = None  # read densely, with the statistics of some sparse layers
        held_layers: Sequence[int] = ()
        for density in densities:
            policy: Any = RecommendedConfig(density=density, plan=plan)
            numbers = None
            if where is None:
                policy, numbers = policy.for_program(
                    model_config.num_layers, room // policy.block_size
                )
            reads = settings(policy=policy, phase="prefill")
            logits, _ = _read(params, tokens, end, columns, numbers, settings=reads)
            _, kl, same = compare_logits(exact, logits, jnp.zeros(len(exact), jnp.int32))
            found.setdefault(("prefill", density), []).append((_mean(kl), _mean(same)))
            decodes = settings(policy=policy, phase="decode")
            # A plan may make layers dense from some density on, which then have no statistics.
            layers = sparse_layers(model_config, policy)
            if held is None or layers != held_layers:
                held_layers = layers
                held = _read(params, tokens, start, columns[:, :1], numbers, settings=decodes)[1]
            caches = cache_for(plain, held), held
            _, kl, same, _ = compare_program(
                params, *caches, own, numbers, plain=plain, settings=decodes
            )
            found.setdefault(("decode", density), []).append((_mean(kl[0]), _mean(same[0])))
        after()
    losses = []
    for (phase, density), each in found.items():
        kl, same = np.mean(each, axis=0)
        most = max(one for one, _ in each)
        policy = RecommendedConfig(density=density, plan=plan, num_layers=model_config.num_layers)
        kept = _kept_at(policy, num_tokens, is_token=phase == "decode")
        rounded = (max(float(f"{one:.4g}"), 0.0) for one in (kept, kl, most, same))
        losses.append(Loss(phase, num_tokens, density, *rounded))
    return tuple(sorted(losses, key=lambda one: (one.phase != "prefill", one.density)))


@partial(jax.jit, static_argnames="settings")
def _read(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    numbers: PyTree = None,
    *,
    settings: Settings,
) -> tuple[Float[Array, "C V"], Cache]:
    """Reads a text into a new cache; returns the first row's logits, and the cache."""
    settings = settings.with_numbers(numbers)
    hidden, cache = read_into_new_cache(params, tokens, lengths, columns, settings=settings)
    return unembed(params, hidden[0], model_config=settings.model_config), cache


def _kept_at(policy: RecommendedConfig, num_tokens: int, *, is_token: bool) -> float:
    """Returns the share of its keys that a row at the end of a text keeps, mean over all layers."""
    size, layers = policy.unit_size if is_token else policy.block_size, policy.num_layers or 1
    pages = policy.budgets(-(-num_tokens // size), is_token=is_token)[:, -1]
    sparse = float(np.mean(np.minimum(1.0, pages * policy.unit_size / num_tokens)))
    dense = sum(map(policy.is_dense, range(layers))) / layers
    return dense + (1.0 - dense) * sparse


def _mean(values: Array) -> float:
    return float(np.mean(np.asarray(values), dtype=np.float64))


def loss_passages(
    tokenizer: Any, *, num_tokens: int, text: Text | None = None, count: int = PASSAGES
) -> list[Int[np.ndarray, "_"]]:
    """Draws passages of a text for `measure_losses`, which no evaluation scores."""
    sources = [prompt_rng("model_losses", num_tokens, HELD_OUT, index) for index in range(count)]
    text = read_text() if text is None else text
    drawn = draw_passages(text, tokenizer, num_tokens=num_tokens, sources=sources)
    return [np.asarray(one, np.int32) for one in drawn]


def planning_prompts(
    tokenizer: Any, *, num_tokens: int, count: int, text: Text | None = None
) -> list[Int[np.ndarray, "_"]]:
    """Draws prompts to plan on, text with and without hidden facts, that no evaluation scores.

    Instruction models read them in their chat template.

    Args:
      tokenizer: A tokenizer of transformers.
      num_tokens: Most tokens of a prompt.
      count: Number of prompts, of several tasks in turn.
      text: Text to hide facts in; Python's help topics by default.
    """
    check_integer("count", count)
    text = read_text() if text is None else text
    found = []
    for index in range(count):
        nth, place = divmod(index, len(TASKS))
        (sample,) = draw_samples(
            TASKS[place],
            text,
            tokenizer,
            num_tokens=num_tokens - ANSWER_ROOM,
            count=1,
            first=nth,
            seed=HELD_OUT,
            wording="chat" if tokenizer.chat_template else "plain",
        )
        is_asked = sample.answer_start == len(sample.tokens)
        found.append(np.concatenate([sample.tokens, sample.answer[: None if is_asked else 0]]))
    return found
