"""What the form of block lists costs in answers, apart from what approximate scores cost.

    python benchmarks/ceilings.py --model FILE.gguf --tokens 4096 --density 0.1
    python benchmarks/ceilings.py --model FILE.gguf --form shared "per kv head" --density 0.05 0.2
    python benchmarks/report.py      # anywhere: the table

A prompt hides 16 codes in a text and then states 8 of them again, in an order of its own. The
stated answers are part of the prompt (teacher forcing), so one prefill scores all of them: an
answer is right if each of its tokens is the likeliest. Only answers that dense attention gets right
count. Attention is sparse in the whole prompt.

A *form* says how the pairs that a density pays for are dealt: how many queries and heads share a
list, how long a block of keys is, and whether every row of a layer gets its share or rows, heads
and layers draw on one pool. `exact` forms rank by dense attention's own shares of the softmax, on
the way that the sparse model goes. All forms of a density keep the same number of (head, query,
key) triples in a layer, the last form of a pool over layers in all layers together; measured
densities stand beside the answers, and so does the number of blocks of 64 tokens that the rows
keep in which the questions stand.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import sketchwalk_jax as sw
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation import read_text
from sketchwalk_jax.evaluation.planning import whole_prompt
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.wording import wording_of
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import embed, run_layers, unembed
from sketchwalk_jax.policies.block_codes import BlockCodes, encode, round_queries
from sketchwalk_jax.policies.recommended import (
    RecommendedConfig,
    page_budget,
    representative_queries,
)
from sketchwalk_jax.precision import default_scale
from sketchwalk_jax.text import Haystack, Text, WordEncoder, prompt_rng
from sketchwalk_jax.tokenizer import decode, load_tokenizer

PyTree = Any
OUT = common.RESULTS / "ceilings.json"
NAMES = ("model", "tokens", "form", "density")
BLOCK = 64
HIDDEN, ASKED, TEXT_COLUMNS = 16, 8, 256
EARLY = 1024  # tokens whose loss is told apart: rows that keep more than their share or suffer


@dataclasses.dataclass(frozen=True)
class Form:
    """How pairs of queries and keys are dealt.

    Attributes:
      queries: Queries that share a list: 64, 32, 16 or 1. With 1, attention is sparse only in the
        rows that ask, as in decode after a prompt that was read densely.
      keys: Keys of a block.
      lists: Heads that share a list: `"all"`, `"kv"` (those of a key/value head) or `"query"`.
      pool: What shares a budget: `"row"` (each row gets its share), `"rows"` of a layer and list,
        `"heads"` (rows and lists of a layer) or `"layers"` (everything).
      exponent: Of the norm that puts shares of queries and heads together; 0 is the maximum.
      scores: `"exact"`, or `"codes"`: those of the recommended policy.
      has_plan: Whether the recommended policy has the model's plan.
      decay: Of the evidence from layer to layer.
      sink: First keys that every row keeps.
      local: Last keys that it keeps, up to the end of its own 64 (of its own block if it is of one
        query).
      floor: Keys that it keeps at least, where rows get their share.
      repays: Whether late rows give back what the floor gave to early ones.
      representatives: Queries that stand for a row in approximate scores.
    """

    queries: int = 64
    keys: int = 64
    lists: str = "all"
    pool: str = "row"
    exponent: int = 4
    scores: str = "exact"
    has_plan: bool = False
    decay: float = 0.0
    sink: int = BLOCK
    local: int = 2 * BLOCK
    floor: int = 4 * BLOCK
    repays: bool = True
    representatives: int = 8


_PAGES = Form(keys=16, sink=16, local=BLOCK + 32, floor=128, repays=False)
_SHARP = dataclasses.replace(_PAGES, exponent=8)
_NEAR = dataclasses.replace(_SHARP, scores="codes", decay=0.4)
_TOKEN = Form(queries=1, local=BLOCK, floor=128, repays=False)
FORMS: dict[str, Form] = {
    "shared": Form(),
    "per key/value head": Form(lists="kv"),
    "per query head": Form(lists="query"),
    "rows of 16 queries": Form(queries=16),
    "blocks of 16 keys": Form(keys=16),
    "pooled over rows": Form(pool="rows"),
    "pooled over rows and heads": Form(lists="kv", pool="heads"),
    "pooled over layers": Form(lists="kv", pool="layers"),
    "ranked by the largest share": Form(exponent=0),
    "ranked by mass": Form(exponent=1),
    "remembered across layers": Form(decay=0.7),
    "approximate, no plan": Form(scores="codes", decay=0.7),
    "approximate, plan": Form(scores="codes", decay=0.7, has_plan=True),
    "no repayment": Form(floor=192, repays=False),
    "no repayment, floor of 256 keys": Form(repays=False),
    "pages of 16 keys, as much forced": Form(keys=16, floor=192, repays=False),
    "pages of 16 keys": _PAGES,
    "pages of 8 keys": dataclasses.replace(_PAGES, keys=8),
    "pages of 32 keys": dataclasses.replace(_PAGES, keys=32, sink=32),
    "pages, rows of 16 queries": dataclasses.replace(_PAGES, queries=16),
    "pages, rows of 32 queries": dataclasses.replace(_PAGES, queries=32),
    "pages, per key/value head": dataclasses.replace(_PAGES, lists="kv"),
    "pages, per query head": dataclasses.replace(_PAGES, lists="query"),
    "pages, pooled over rows": dataclasses.replace(_PAGES, pool="rows"),
    "pages, pooled over rows and heads": dataclasses.replace(_PAGES, lists="kv", pool="heads"),
    "pages, exponent 8": _SHARP,
    "pages, largest share": dataclasses.replace(_PAGES, exponent=0),
    "pages, approximate, 8 queries": _NEAR,
    "pages, approximate, 16 queries": dataclasses.replace(_NEAR, representatives=16),
    "pages, approximate, 32 queries": dataclasses.replace(_NEAR, representatives=32),
    "pages, approximate, 8 queries, plan": dataclasses.replace(_NEAR, has_plan=True),
    "pages, approximate, 16 queries, plan": dataclasses.replace(
        _NEAR, representatives=16, has_plan=True
    ),
    "pages, approximate, 16 queries, floor of 256 keys": dataclasses.replace(
        _NEAR, representatives=16, floor=256
    ),
    "a token, exact, blocks": _TOKEN,
    "a token, exact, pages": dataclasses.replace(_TOKEN, keys=16, sink=16, exponent=8),
    "a token, approximate, blocks": dataclasses.replace(_TOKEN, scores="codes", decay=0.7),
    "a token, approximate, pages": dataclasses.replace(
        _TOKEN, keys=16, sink=16, exponent=8, scores="codes", decay=0.4
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens with their answers in them.

    Attributes:
      tokens: int32, right-padded.
      length: How many there are.
      columns: Columns before the tokens of each answer, int32 `[A, W]`, and how many, `[A]`.
      widths: Tokens of each answer.
      asking: Columns from the first question to the last answer.
      text: Columns of the text whose loss is taken.
    """

    tokens: Int[np.ndarray, "T"]
    length: int
    columns: Int[np.ndarray, "A W"]
    widths: Int[np.ndarray, "A"]
    asking: Bool[np.ndarray, "T"]
    text: Int[np.ndarray, "C"]


def draw_prompts(
    text: Text, tokenizer: Any, *, num_tokens: int, count: int, seed: int, first: int = 0
) -> list[Prompt]:
    """Prompts with many questions and their answers; sample i depends on `seed` and i alone."""
    is_chat = bool(tokenizer.chat_template)
    wording = wording_of("chat" if is_chat else "plain")
    encoder = WordEncoder(tokenizer, opening=wording.opening("multi_key", tokenizer))
    haystack = Haystack(text, encoder, num_tokens)
    found = []
    for index in range(first, first + count):
        rng = prompt_rng("ceilings", num_tokens, seed, index)
        passage = haystack.draw(rng)
        present = set(re.findall("[a-z]+", " ".join(passage).lower()))
        names = [word for word in text.held_out_words if word not in present]
        words = [names[i] for i in rng.choice(len(names), HIDDEN, replace=False)]
        numbers = [str(10000 + n) for n in rng.choice(90000, HIDDEN, replace=False)]
        statements = [
            encoder.sentence(wording.code(*pair)) for pair in zip(words, numbers, strict=True)
        ]
        end: list[int] = []
        spans = []
        for place, one in enumerate(rng.choice(HIDDEN, ASKED, replace=False)):
            asked = wording.ask_code(words[one], numbers[one])
            if is_chat and place == 0:
                every = dataclasses.replace(asked, question="What are the secret codes?")
                end += encoder.passage(wording.frame("multi_key", every, tokenizer).asking)
            else:
                end += encoder.passage(f" {asked.prefix}" if is_chat else asked.question)
            answer = encoder.passage(asked.answer)
            is_digit = [any(c.isdigit() for c in decode(tokenizer, [one])) for one in answer]
            spans.append([len(end) + i for i, yes in enumerate(is_digit) if yes])
            end += answer
        hay = haystack.fit(passage, num_tokens - len(end) - sum(map(len, statements)))
        places = np.sort(rng.choice(len(hay), HIDDEN, replace=False))
        inserted = dict(zip(places.tolist(), statements, strict=True))
        tokens: list[int] = []
        for place, piece in enumerate(hay):
            tokens += piece + inserted.get(place, [])
        start = len(tokens)
        tokens += end
        width = max(map(len, spans))
        columns = np.array(
            [[start + i - 1 for i in one + one[-1:] * (width - len(one))] for one in spans]
        )
        column = np.arange(num_tokens)
        found.append(
            Prompt(
                np.pad(np.array(tokens, np.int32), (0, num_tokens - len(tokens))),
                len(tokens),
                columns.astype(np.int32),
                np.array([len(one) for one in spans]),
                (column >= start) & (column < len(tokens)),
                np.linspace(2 * BLOCK, start - 2, TEXT_COLUMNS).astype(np.int32),
            )
        )
    return found


def num_lists(form: Form, model_config: ModelConfig) -> int:
    """Lists that each row of a layer has."""
    heads = {"all": 1, "kv": model_config.num_kv_heads, "query": model_config.num_heads}
    return heads[form.lists]


def row_budget(form: Form, num_blocks: int, density: float) -> Int[np.ndarray, "I"]:
    """Blocks of the form's size that rows of 64 queries keep."""
    per_block = BLOCK // form.keys
    if form.repays:
        floor = form.floor // BLOCK
        rule: dict[str, Any] = {"pages": 1, "least": floor, "repays": True}
        return per_block * page_budget(num_blocks, density=density, **rule)
    return page_budget(num_blocks, density=density, pages=per_block, least=form.floor // form.keys)


def forced_blocks(form: Form, num_tokens: int) -> tuple[Array, Array]:
    """Which blocks rows always keep, and which are causal, `[I, J]` in the form's sizes."""
    row = jnp.arange(num_tokens // form.queries)[:, None] * form.queries
    block = jnp.arange(num_tokens // form.keys)[None, :] * form.keys
    is_causal = block <= row + form.queries - 1
    own = form.keys if form.queries == 1 else BLOCK
    own_end = row // own * own + own
    return ((block < form.sink) | (block >= own_end - form.local)) & is_causal, is_causal


def norm(shares: Float[Array, "*n"], exponent: int, axis: int | tuple[int, ...]) -> Array:
    """The norm of some order; the maximum with 0."""
    if exponent == 0:
        return jnp.max(shares, axis=axis)
    return jnp.sum(shares**exponent, axis=axis) ** (1.0 / exponent)


def exact_evidence(form: Form, logits: Float[Array, "N T T"], lists: int) -> Float[Array, "G I J"]:
    """Shares of dense attention, put together for each list and row."""
    heads, num_tokens, _ = logits.shape
    weights = jax.nn.softmax(logits, axis=-1)
    shares = weights.reshape(heads, num_tokens, -1, form.keys).sum(axis=-1)
    shares = shares.reshape(heads, -1, form.queries, shares.shape[-1])
    by_head = norm(shares, form.exponent, 2)
    return norm(by_head.reshape(lists, -1, *by_head.shape[1:]), form.exponent, 1)


def approximate_evidence(
    form: Form, policy: RecommendedConfig, query: Array, key: Array, length: Array, layer: Array
) -> Float[Array, "G I J"]:
    """The recommended policy's scores, put together for each list and row."""
    span = whole_prompt(query[:, :, 0, 0], length)
    channels = slice(None) if form.scores == "all channels" else policy.channels(query.shape[-1])
    kept = key[0][..., channels]  # [T K C]
    blocks = kept.reshape(-1, BLOCK, *kept.shape[1:])
    position = jnp.arange(len(kept))
    present = (position < length).reshape(1, -1, BLOCK)
    centre = jnp.zeros_like(blocks[:, 0])
    if form.scores == "codes":
        code, centre, step = encode(blocks[None], present)
        codes = BlockCodes(code, centre, step, blocks[None, 0])
        kept, centre = codes.residual(jnp.asarray(0), len(blocks), key.dtype)[0], centre[0]
    group = query.shape[2] // key.shape[2]
    lists = {"all": 1, "kv": key.shape[2], "query": query.shape[2]}[form.lists]
    is_causal = forced_blocks(form, query.shape[1])[1]

    def score(queries: Float[Array, "1 I R N C"]) -> Float[Array, "G I J"]:
        grouped = queries[0].reshape(*queries.shape[1:3], key.shape[2], group, -1)
        rounded = round_queries(grouped) if form.scores == "codes" else grouped
        dot = partial(jnp.einsum, "irkgc,skc->kgirs", preferred_element_type=jnp.float32)
        peaks = jnp.where(position < length, dot(rounded, kept), -jnp.inf)
        peaks = jnp.max(peaks.reshape(*peaks.shape[:-1], -1, form.keys), axis=-1)
        beside = dot(grouped, centre.astype(queries.dtype))
        logits = peaks + jnp.repeat(beside, BLOCK // form.keys, axis=-1)
        logits = jnp.where(is_causal[:, None], logits * default_scale(query.shape[-1]), -jnp.inf)
        shares = jax.nn.softmax(logits, axis=-1)  # [K G I R J]
        by_head = norm(shares, form.exponent, 3).reshape(lists, -1, *is_causal.shape)
        return norm(by_head, form.exponent, 1)

    def represent(count: int) -> Float[Array, "1 I R N C"]:
        if form.queries == 1:
            return query[:, :, None][..., channels]
        found = representative_queries(query, span.valid, block_size=BLOCK, count=count)
        if form.scores == "all channels":
            return found
        own = query[..., channels]
        return representative_queries(own, span.valid, block_size=BLOCK, count=count)

    counts = policy.sparse_representatives
    kinds = sorted(set(counts))
    kind = jnp.asarray([kinds.index(one) for one in counts])[jnp.minimum(layer, len(counts) - 1)]
    return jax.lax.switch(kind, [partial(lambda n: score(represent(n)), one) for one in kinds])


def kept_blocks(
    form: Form,
    evidence: Float[Array, "G I J"],
    num_tokens: int,
    *,
    counts: Int[Array, "I"],
    threshold: Float[Array, "G"],
) -> Bool[Array, "G I J"]:
    """Which blocks each list of each row keeps."""
    forced, is_causal = forced_blocks(form, num_tokens)
    ranked = jnp.where(forced, jnp.inf, evidence)
    ranked = jnp.where(is_causal, ranked, -jnp.inf)
    if form.pool == "row":
        wanted = counts[jnp.arange(num_tokens // form.queries) * form.queries // BLOCK]
        order = jnp.argsort(-ranked, axis=-1)
        rank = jnp.argsort(order, axis=-1)
        return (rank < wanted[None, :, None]) & is_causal
    if form.pool == "layers":
        return (ranked >= threshold[:, None, None]) & is_causal
    total = jnp.sum(counts) * (BLOCK // form.queries)
    flat = ranked.reshape(len(ranked), -1) if form.pool == "rows" else ranked.reshape(1, -1)
    total = total * (1 if form.pool == "rows" else len(ranked))
    least = jnp.take(-jnp.sort(-flat, axis=-1), total - 1, axis=-1)
    return (ranked >= least[:, None, None]) & is_causal


@partial(jax.jit, static_argnames=("form", "policy", "model_config", "is_dense"))
def read(
    params: PyTree,
    tokens: Int[Array, "T"],
    length: Int[Array, ""],
    asking: Bool[Array, "T"],
    columns: Int[Array, "C"],
    counts: Int[Array, "L I"],
    thresholds: Float[Array, "L G"],
    *,
    form: Form,
    policy: RecommendedConfig,
    model_config: ModelConfig,
    is_dense: bool = False,
) -> tuple[Array, Array, Array, Array, Array | None]:
    """One prompt in one form, or densely.

    Returns:
      After each column the likeliest token and the loss of the right one; density and blocks of
      rows that ask, by layer; and where attention is dense the evidence of the form in all layers.
    """
    num_tokens = tokens.shape[0]
    position = jnp.arange(num_tokens)
    is_causal = (position[:, None] >= position[None, :]) & (position < length)[None, :]
    is_query = position < length
    pairs = jnp.sum(is_causal & is_query[:, None], dtype=jnp.float32)

    def attend(query: Array, key: Array, value: Array, layer: Array, walk: Array) -> Any:
        kv_heads, heads = key.shape[2], query.shape[2]
        wide = jnp.repeat(key[0], heads // kv_heads, axis=1)
        logits = jnp.einsum("tnh,snh->nts", query[0], wide, preferred_element_type=jnp.float32)
        logits = jnp.where(is_causal, logits * default_scale(query.shape[-1]), -jnp.inf)
        logits = jnp.where(is_query[:, None], logits, 0.0)
        if form.scores == "exact":
            found = exact_evidence(form, logits, num_lists(form, model_config))
        else:
            found = approximate_evidence(form, policy, query, key, length[None], layer)
        evidence = jnp.maximum(found, form.decay * walk)
        told = jnp.float32(1), jnp.float32(0)
        if not is_dense:
            kept = kept_blocks(
                form, evidence, num_tokens, counts=counts[layer], threshold=thresholds[layer]
            )
            kept = jnp.repeat(jnp.repeat(kept, form.queries, axis=1), form.keys, axis=2)
            if form.queries == 1:
                kept = kept | ~asking[:, None]
            by_query = jnp.sum(kept & is_causal, axis=(0, 2), dtype=jnp.float32) / len(kept)
            blocks = jnp.sum(kept, axis=(0, 2), dtype=jnp.float32) / len(kept) / BLOCK
            told = (
                jnp.sum(jnp.where(is_query, by_query, 0.0)) / pairs,
                jnp.sum(jnp.where(asking, blocks, 0.0)) / jnp.sum(asking),
            )
            kept = jnp.repeat(kept, heads // len(kept), axis=0)
            logits = jnp.where(kept & is_causal, logits, -jnp.inf)
            logits = jnp.where(is_query[:, None], logits, 0.0)
        weights = jax.nn.softmax(logits, axis=-1)
        wide = jnp.repeat(value[0], heads // kv_heads, axis=1)
        out = jnp.einsum("nts,snh->tnh", weights.astype(value.dtype), wide)
        return out[None], evidence, (*told, evidence if is_dense else None)

    rows, blocks = num_tokens // form.queries, num_tokens // form.keys
    hidden, _, (found,) = run_layers(
        params,
        embed(params, tokens[None]),
        position[None].astype(jnp.int32),
        jnp.zeros((num_lists(form, model_config), rows, blocks)),
        model_config=model_config,
        layers=[(range(model_config.num_layers), attend)],
    )
    density, asking_blocks, evidence = found

    def score(column: Array) -> tuple[Array, Array]:
        logits = unembed(params, hidden[0, column], model_config=model_config)
        return jnp.argmax(logits), jax.nn.logsumexp(logits) - logits[tokens[column + 1]]

    likeliest, losses = jax.lax.map(score, columns)
    return likeliest, losses, density, asking_blocks, evidence


def threshold_for(
    form: Form, evidence: Float[np.ndarray, "L G I J"], num_tokens: int, wanted: float
) -> float:
    """What the best entries of all layers exceed, `wanted` of them with those that are forced."""
    forced, is_causal = map(np.asarray, forced_blocks(form, num_tokens))
    free = evidence[:, :, is_causal & ~forced].ravel()
    count = int(wanted - forced.sum() * evidence.shape[0] * evidence.shape[1])
    count = min(max(count, 1), len(free))
    return float(np.partition(free, len(free) - count)[len(free) - count])


class Reader:
    """Reads prompts of one length by one model; keeps a program for each form."""

    def __init__(self, params: PyTree, model_config: ModelConfig, num_tokens: int) -> None:
        """Starts without programs."""
        self.params, self.model_config, self.num_tokens = params, model_config, num_tokens
        self.num_blocks = num_tokens // BLOCK
        self._programs: dict[Any, Any] = {}

    def policy(self, form: Form, density: float) -> RecommendedConfig:
        """The policy that scores; only with a plan does it depend on the density."""
        return sw.SketchWalkConfig.recommended_blocks(
            density=density if form.has_plan else 0.1,
            representatives=form.representatives,
            plan=self.model_config.plan if form.has_plan else None,
            num_layers=self.model_config.num_layers,
        )

    def counts(self, form: Form, density: float) -> Int[np.ndarray, "L I"]:
        """Blocks of every row in every layer, in uniform forms; what sums are made of in others."""
        num_layers = self.model_config.num_layers
        if not form.has_plan:
            return np.tile(row_budget(form, self.num_blocks, density), (num_layers, 1))
        policy = self.policy(form, density)
        every = np.arange(1, self.num_blocks + 1, dtype=np.int32) * (BLOCK // form.keys)
        return np.stack(
            [
                every if policy.is_dense(layer) else row_budget(form, self.num_blocks, own)
                for layer, own in enumerate(policy.layer_densities)
            ]
        )

    def compile(self, form: Form, density: float, prompt: Prompt, *, is_dense: bool = False) -> Any:
        """The program of a form, which takes the arguments of `read`."""
        static: dict[str, Any] = dict(
            form=form,
            policy=self.policy(form, density),
            model_config=self.model_config,
            is_dense=is_dense,
        )
        key = tuple(static.values())
        if key not in self._programs:
            arguments = self._arguments(prompt, form, density, np.zeros(self._lists(form)))
            self._programs[key] = read.lower(self.params, *arguments, **static).compile()
        return self._programs[key]

    def read(
        self,
        prompt: Prompt,
        form: Form,
        density: float,
        *,
        threshold: float | Float[np.ndarray, "L G"] = 0.0,
        is_dense: bool = False,
    ) -> tuple[np.ndarray, ...]:
        """`read` of one prompt, on the host."""
        thresholds = np.broadcast_to(threshold, self._lists(form))
        arguments = self._arguments(prompt, form, density, thresholds)
        found = self.compile(form, density, prompt, is_dense=is_dense)(self.params, *arguments)
        return tuple(None if one is None else np.asarray(one) for one in found)

    def _lists(self, form: Form) -> tuple[int, int]:
        """Layers, and lists of a row in one of them."""
        return self.model_config.num_layers, num_lists(form, self.model_config)

    def _arguments(
        self, prompt: Prompt, form: Form, density: float, thresholds: Float[np.ndarray, "L G"]
    ) -> tuple[np.ndarray, ...]:
        columns = np.concatenate([prompt.columns.ravel(), prompt.text]).astype(np.int32)
        counts = self.counts(form, density)
        length = np.asarray(prompt.length, np.int32)
        thresholds = np.asarray(thresholds, np.float32)
        return prompt.tokens, length, prompt.asking, columns, counts, thresholds


def is_right(prompt: Prompt, likeliest: Int[np.ndarray, "C"]) -> list[bool]:
    """Whether every token of each answer is the likeliest one."""
    columns = prompt.columns
    found = np.asarray(likeliest)[: columns.size].reshape(columns.shape)
    return (found == prompt.tokens[columns + 1]).all(axis=1).tolist()


def main() -> None:
    """Measures what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--density", type=float, nargs="+", default=[0.1])
    parser.add_argument("--form", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="0 is the report's elsewhere")
    parser.add_argument("--dtype", help="default: the checkpoint's, float32 on CPUs")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--seconds", type=float, default=np.inf, help="begin no form later")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    keep_compiled_programs()
    end = time.monotonic() + options.seconds
    text = read_text(options.text)
    for path in options.model:
        is_cpu = jax.default_backend() == "cpu"
        dtype = options.dtype or ("float32" if is_cpu else None)
        params, model_config = sw.load(path, dtype=dtype, progress=False)
        tokenizer = load_tokenizer(path)
        for num_tokens in options.tokens:
            prompts = draw_prompts(
                text, tokenizer, num_tokens=num_tokens, count=options.prompts, seed=options.seed
            )
            reader = Reader(params, model_config, num_tokens)
            with common.Compiling() as pool:
                pool.submit(
                    partial(reader.compile, is_dense=True), FORMS["shared"], 0.1, prompts[0]
                )
                for name in options.form:
                    for density in options.density:
                        pool.submit(reader.compile, FORMS[name], density, prompts[0])
            dense = [reader.read(one, FORMS["shared"], 0.1, is_dense=True) for one in prompts]
            for density in options.density:
                rows = []
                for name in options.form:
                    form = FORMS[name]
                    if form.has_plan and model_config.plan is None:
                        continue
                    if time.monotonic() > end:
                        break
                    found = measure(reader, prompts, dense, form, density)
                    row = {"model": path.stem, "tokens": num_tokens, "form": name}
                    rows.append(row | {"density": density} | found)
                    print(*row.values(), density, *summary(found), flush=True)
                meta = common.describe_machine(
                    sha256={path.stem: hash_weights(path)}, seed=options.seed, text=text.name
                )
                common.add_rows(options.out, meta, rows, NAMES)


def measure(
    reader: Reader,
    prompts: Sequence[Prompt],
    dense: Sequence[tuple[np.ndarray, ...]],
    form: Form,
    density: float,
) -> dict[str, Any]:
    """What a form keeps of each prompt's answers, its density and its loss on text."""
    kept, asked, densities, blocks, losses, early = [], [], [], [], [], []
    for prompt, before in zip(prompts, dense, strict=True):
        threshold = 0.0
        if form.pool == "layers":
            evidence = reader.read(prompt, form, density, is_dense=True)[-1]
            counts = reader.counts(form, density)
            total = counts.sum() * (BLOCK // form.queries)
            threshold = threshold_for(
                form, evidence, reader.num_tokens, float(total * evidence.shape[1])
            )
        found = reader.read(prompt, form, density, threshold=threshold)
        right = np.array(is_right(prompt, before[0]))
        kept.append(int((right & np.array(is_right(prompt, found[0]))).sum()))
        asked.append(int(right.sum()))
        densities.append(float(found[2].mean()))
        blocks.append(float(found[3].mean()))
        more = (found[1] - before[1])[prompt.columns.size :]
        losses.append(float(more.mean()))
        early.append(float(more[prompt.text < EARLY].mean()))
    return {
        "kept": kept,
        "asked": asked,
        "measured_density": densities,
        "asking_blocks": blocks,
        "text_loss": losses,
        "early_loss": early,
    }


def summary(found: dict[str, Any]) -> list[str]:
    """A line for people who wait."""
    share = sum(found["kept"]) / max(1, sum(found["asked"]))
    means = [
        np.mean(found[name])
        for name in ("measured_density", "asking_blocks", "text_loss", "early_loss")
    ]
    return [f"{sum(found['kept'])}/{sum(found['asked'])}={share:.3f}", *(f"{x:.4f}" for x in means)]


if __name__ == "__main__":
    main()
