"""Text in, text out: a model, its tokenizer and a policy in one object."""

import contextlib
import dataclasses
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Key, Shaped

from sketchwalk_jax.calibration import set_density
from sketchwalk_jax.inference.auto import Auto, Choice, check_policy_or_auto, default_policy
from sketchwalk_jax.inference.cache import Cache, Density
from sketchwalk_jax.inference.calls import cache_bytes
from sketchwalk_jax.inference.compiled import keep_by_default
from sketchwalk_jax.inference.generation import Generate, Stream, for_stream, make_generate
from sketchwalk_jax.inference.padding import bucket_length, new_token_room, pad_right
from sketchwalk_jax.inference.sampling import Sampling, check_key
from sketchwalk_jax.memory import free_bytes
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import find_checkpoint
from sketchwalk_jax.models.params import ParamsSharding, check_weights, weights_of
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.policies import Policy, takes_density, with_plan
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.sharding import placement_of
from sketchwalk_jax.text.tokenizer import (
    StreamDecoder,
    apply_chat_template,
    decode,
    encode,
    load_tokenizer,
)
from sketchwalk_jax.validation import check_integer, check_integers, check_texts

PyTree = Any
Message = Mapping[str, Any]
KeyLike = int | Shaped[Array, "..."]
"""A seed, or a key from `jax.random.key` or `jax.random.PRNGKey`."""

MAX_BATCH = 8
"""Maximum number of prompts per batch, unless a batch size is given."""

LEAST_CONVERSATION = 2048
"""Minimum capacity of a conversation's cache in tokens, within the model's context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The new text of one prompt, with its measurements.

    Attributes:
      text: The new text.
      prompt_tokens: Number of prompt tokens that were read, without padding.
      new_tokens: Number of generated tokens, including an end token.
      finish_reason: `"eos"` if the text ended with an end token, else `"length"`.
      measured_density: Fraction of causal (query, key) pairs attended to, over all layers and both
        phases.
      measured_density_prefill: The same fraction over the prompt.
      measured_density_decode: The same fraction over the new tokens; NaN if there are none.
      is_finite: Whether all logits were finite. If they were not, the text is meaningless.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    measured_density: float
    measured_density_prefill: float
    measured_density_decode: float
    is_finite: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model with its tokenizer and a policy: strings in, strings out.

    This class only adds text to the pure functions. It keeps no state between calls. `params`,
    `model_config` and `policy` are arguments of `sketchwalk_jax.generate`. As in `make_generate`,
    lengths are padded to a few sizes, so few programs are compiled; both share them.

    Attributes:
      params: Parameter tree.
      model_config: Configuration of the model.
      tokenizer: A tokenizer of transformers.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`. An `Auto` is resolved at each
        call.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`.
      chunk_size: Number of prompt tokens processed at a time. None processes all at once.
      eos_token_ids: Tokens that end a text. Default: the model's end tokens.

    Example:
      >>> lm = LanguageModel.load("Qwen/Qwen3-0.6B")  # doctest: +SKIP
      >>> lm.generate("The capital of France is", max_new_tokens=8)  # doctest: +SKIP
      ' Paris. The capital of Italy is'
    """

    params: PyTree
    model_config: ModelConfig
    tokenizer: Any
    policy: Policy | Auto
    phase: str = "both"
    chunk_size: int | None = None
    eos_token_ids: tuple[int, ...] | None = None

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        policy: Policy | Auto | None = None,
        density: float | None = None,
        dtype: DTypeLike | None = None,
        weights: str | None = None,
        sharding: ParamsSharding = None,
        warm_up: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Loads a checkpoint with its tokenizer.

        Args:
          source: A checkpoint directory, a GGUF file, or `"ORG/NAME"` on the Hugging Face hub, as
            in `sketchwalk_jax.load`.
          policy: The policy that chooses the key blocks of each query, such as
            `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; or an `Auto`. Default:
            an `Auto` of `SketchWalkConfig.recommended()`. A recommended policy gets the plan of the
            model, if there is one.
          density: Density of the policy, as in `with_policy`.
          dtype: Dtype of the parameters. Default: float32 on CPUs, which compute slowly in smaller
            types, and the dtype of the checkpoint on other devices.
          weights: `"float8"` or `"int8"` to quantize linear layers, as in `sketchwalk_jax.load`.
          sharding: Where the parameters are placed, as in `sketchwalk_jax.load`.
          warm_up: Number of tokens of the prompts to come, for which programs are compiled while
            the weights are read (`warm_up`). Default: nothing is compiled before the first call.
          progress: Whether to show progress on standard error.

        Returns:
          The model.

        Raises:
          ValueError: In the same cases as `sketchwalk_jax.load` and `load_tokenizer`, which can
            also raise other errors.

        Example:
          >>> from sketchwalk_jax.models import bundled_model
          >>> LanguageModel.load(bundled_model()).model_config.num_layers
          12
        """
        check_integer("warm_up", warm_up, is_optional=True)
        if policy is not None:
            check_policy_or_auto(policy)
        if weights is not None:
            check_weights(weights)
        checkpoint = find_checkpoint(source, progress=progress)
        tokenizer = load_tokenizer(checkpoint)  # before the weights, which take longer
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"

        def make(params: PyTree, model_config: ModelConfig) -> Any:
            chosen = default_policy(model_config) if policy is None else policy
            made = cls(params=params, model_config=model_config, tokenizer=tokenizer, policy=chosen)
            return made.with_policy(chosen, density=density)

        def begin(shapes: PyTree, model_config: ModelConfig) -> None:
            is_calibrated = isinstance(policy, PrefillPolicy) and density is not None
            if warm_up is not None and sharding is None and not is_calibrated:
                make(shapes, model_config).warm_up(warm_up)

        params, model_config = load(
            checkpoint,
            dtype=dtype,
            weights=weights,
            sharding=sharding,
            progress=progress,
            before_reading=begin,
        )
        made: Self = make(params, model_config)
        if warm_up is not None:
            made.warm_up(warm_up)
        return made

    def warm_up(
        self, num_tokens: int, *, max_new_tokens: int = 128, sampling: Sampling | None = None
    ) -> None:
        """Begins to load or compile the programs for one prompt, in other threads.

        The first call then waits only for what is left, and so does the end of the process. This
        does nothing for a model on several devices.

        Args:
          num_tokens: Number of tokens of the prompt. Prompts of the same class share programs.
          max_new_tokens: Maximum number of tokens to generate.
          sampling: Sampling settings of the call. Default: greedy, which has its own program.

        Raises:
          ValueError: If prompt and new tokens do not fit into the model's context.

        Example:
          >>> from sketchwalk_jax.models import bundled_model
          >>> LanguageModel.load(bundled_model()).warm_up(1000)  # doctest: +SKIP
        """
        keep_by_default()
        check_integer("num_tokens", num_tokens)
        prompt = np.zeros((1, num_tokens), np.int32)
        call = self._made(max_new_tokens).check(self.params, prompt, sampling=sampling)

        def work() -> None:
            with contextlib.suppress(Exception):  # the first call raises what fails here
                for one in (call, for_stream(call)):
                    one.begin(self.params, is_ahead=True)

        threading.Thread(target=work, daemon=True).start()

    def with_policy(
        self,
        policy: Policy | Auto,
        *,
        density: float | None = None,
        num_tokens: int = LEAST_CONVERSATION,
    ) -> Self:
        """Returns the same model with another policy or density; both share the weights.

        Args:
          policy: The policy that chooses the key blocks of each query, such as
            `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; or an `Auto`. A recommended
            policy gets the plan of the model, if there is one.
          density: Fraction of its causal blocks that a query keeps, for every policy except
            `Dense`. The share that MInference and FlexPrefill keep depends on the model and the
            prompt, so they are calibrated to the density on plain English, as in
            `sketchwalk generate --density`. Default: the density of the policy, and the published
            settings for MInference and FlexPrefill.
          num_tokens: Expected length of the prompts in tokens, for that calibration.

        Raises:
          ValueError: If the policy has no density to set, or the density is out of range.

        Example:
          >>> lm = LanguageModel.load("DIR")  # doctest: +SKIP
          >>> for density in (0.1, 0.2, 1.0):  # doctest: +SKIP
          ...     policy = SketchWalkConfig.recommended(density=density)
          ...     print(density, lm.with_policy(policy).generate("Walk"))
          >>> lm.with_policy(MInferenceConfig(), density=0.2).policy.scale  # doctest: +SKIP
          0.2265625
        """
        check_policy_or_auto(policy)
        if isinstance(policy, Auto):
            sparse = policy.policy(self.model_config)
            made = self.with_policy(sparse, density=density, num_tokens=num_tokens).policy
            assert isinstance(made, Policy)
            return dataclasses.replace(self, policy=dataclasses.replace(policy, sparse=made))
        if isinstance(policy, PrefillPolicy) and density is not None:
            policy = set_density(
                policy,
                self.params,
                self.model_config,
                self.tokenizer,
                density=density,
                num_tokens=num_tokens,
            ).policy
        elif density is not None:
            if not takes_density(policy):
                raise ValueError(f"density must be None with a policy of none, got {policy!r}")
            if getattr(policy, "max_kl", None) is not None:
                raise ValueError(f"density must be None with max_kl, got {policy!r}")
            fields: dict[str, Any] = {"density": density}
            policy = dataclasses.replace(policy, **fields)
        return dataclasses.replace(self, policy=with_plan(policy, self.model_config.plan))

    def __repr__(self) -> str:
        """Describes the model and its policy, without printing arrays."""
        config = self.model_config
        model = f"{config.model_type}, {config.num_layers} layers"
        dtype = self.params["embed"]["embedding"].dtype
        density = getattr(self.policy, "density", None)
        policy = type(self.policy).__name__ + (f" of density {density:g}" if density else "")
        weights = weights_of(self.params)
        dtype = dtype if weights is None else f"{dtype} with weights in {weights}"
        return f"LanguageModel({model}, {dtype}, context {config.context_length}, {policy})"

    def encode(self, text: str) -> Int[np.ndarray, "T"]:
        """Tokenizes a prompt, with the beginning-of-sequence token if the model has one.

        Raises:
          ValueError: If the text has no tokens.
        """
        tokens = encode(self.tokenizer, text)
        if not len(tokens):
            raise ValueError(f"the prompt must have at least one token, got none for {text!r}")
        return tokens

    @overload
    def generate(  # type: ignore[overload-overlap]  # a string is a sequence of strings, too
        self,
        prompts: str,
        *,
        max_new_tokens: int = ...,
        sampling: Sampling | None = ...,
        key: KeyLike | None = ...,
        batch_size: int | None = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = ...,
        sampling: Sampling | None = ...,
        key: KeyLike | None = ...,
        batch_size: int | None = ...,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        key: KeyLike | None = None,
        batch_size: int | None = None,
    ) -> str | list[str]:
        """Continues one prompt or several.

        Several prompts are read in batches of similar length, so that there is little padding and
        few programs are compiled. Each prompt gets the same text as if it were alone. An `Auto`
        chooses once for all prompts, by the longest of them and the batch size.

        Args:
          prompts: One text, or a list of texts. Special tokens that are spelled out in a text are
            read as special tokens.
          max_new_tokens: Maximum number of tokens to generate for each prompt.
          sampling: Sampling settings. Default: greedy.
          key: Random key or seed. Without one, every call draws differently.
          batch_size: Maximum number of prompts in a batch. Default: 8, or fewer if the device has
            too little memory for their caches.

        Returns:
          The new text, or a list of new texts in the order of the prompts.

        Raises:
          ValueError: If a prompt is empty or too long for the model, or arguments do not fit
            together.

        Example:
          >>> lm.generate(["Walk with", "The sketch"], max_new_tokens=32)  # doctest: +SKIP
        """
        check_texts("prompts", prompts, "strings")
        several = [prompts] if isinstance(prompts, str) else prompts
        found = self.complete(
            [self.encode(one) for one in several],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            batch_size=batch_size,
        )
        texts = [one.text for _, one in sorted(found, key=lambda one: one[0])]
        return texts[0] if isinstance(prompts, str) else texts

    def complete(
        self,
        prompts: Sequence[Int[np.ndarray, "_"]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        key: KeyLike | None = None,
        batch_size: int | None = None,
        key_ids: Sequence[int] | None = None,
        is_answer: bool | Sequence[bool] = False,
    ) -> Iterator[tuple[int, Completion]]:
        """Continues tokenized prompts, and yields each completion when its batch is done.

        Args:
          prompts: Tokens of each prompt, for example from `encode` or `apply_chat_template`.
          max_new_tokens: Maximum number of tokens to generate for each prompt.
          sampling: Sampling settings. Default: greedy.
          key: Random key or seed. Default: a fresh one. Prompt `i` draws with `fold_in(key, i)`, in
            any batch.
          batch_size: As in `generate`.
          key_ids: Numbers to use instead of `i`, for prompts that are a part of a larger list.
          is_answer: Whether the new text is an answer in a conversation, so a separate text. By
            default it continues the prompt: the texts of prompt and new tokens join to the text of
            all tokens. They differ in the first space of sentencepiece tokenizers. One value for
            all prompts, or one for each.

        Yields:
          The index of a prompt and its completion, longest prompts first.

        Raises:
          ValueError: In the same cases as `generate`.
        """
        check_integer("batch_size", batch_size, is_optional=True)
        for index, one in enumerate(prompts):
            check_integers(f"prompts[{index}]", one, "[T]", 1)
        one_key = _make_key(key, sampling)
        model = self._resolved(prompts, max_new_tokens, batch_size)
        made = model._made(max_new_tokens)
        batch_size = model._batch_size(prompts, max_new_tokens, batch_size)
        ids = range(len(prompts)) if key_ids is None else key_ids
        answers = [is_answer] * len(prompts) if isinstance(is_answer, bool) else is_answer
        for rows in batches_by_length([len(one) for one in prompts], batch_size):
            # Repeat the last prompt up to a power of two, so that few batch sizes are compiled.
            padded = [*rows, *[rows[-1]] * ((1 << (len(rows) - 1).bit_length()) - len(rows))]
            tokens, lengths = pad_right([prompts[row] for row in padded])
            keys = None
            if one_key is not None:
                fold = jax.vmap(jax.random.fold_in, (None, 0))
                keys = fold(one_key, np.array([ids[row] for row in padded], np.uint32))
            out = made(self.params, tokens, lengths=lengths, sampling=sampling, key=keys)
            found = jax.device_get((out.tokens, out.lengths, out.measured_density, out.is_finite))
            new, counts, density, is_finite = found
            for place, row in enumerate(rows):
                own = new[place, : counts[place]]
                yield (
                    row,
                    _completion(
                        decode(self.tokenizer, own, context=() if answers[row] else prompts[row]),
                        len(prompts[row]),
                        own,
                        jax.tree.map(lambda x, row=place: x[..., row : row + 1], density),
                        ends=self._end_tokens,
                        is_finite=bool(is_finite[place]),
                    ),
                )

    def stream(
        self,
        prompt: str | Int[np.ndarray, "_"],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        key: KeyLike | None = None,
        every: int = 4,
        is_answer: bool = False,
    ) -> "TextStream":
        """Continues one prompt and yields the text in pieces while it is generated.

        A piece is never empty and never ends inside a character. The pieces join to the text that
        `generate` returns.

        Args:
          prompt: A text, or its tokens.
          max_new_tokens: Maximum number of tokens to generate.
          sampling: Sampling settings. Default: greedy.
          key: Random key or seed. Without one, every call draws differently.
          every: Number of decode steps between two pieces.
          is_answer: As in `complete`.

        Returns:
          An iterator over strings. Its `completion` describes the text so far.

        Raises:
          ValueError: In the same cases as `generate`, by this call, before the first piece.

        Example:
          >>> for piece in lm.stream("Walk with"):  # doctest: +SKIP
          ...     print(piece, end="", flush=True)
        """
        if isinstance(prompt, str):
            tokens = self.encode(prompt)
        else:
            check_integers("prompt", prompt, "[T], or a string", 1)
            tokens = np.asarray(prompt)
        made, key = self._made(max_new_tokens), _make_key(key, sampling)
        return self._start(
            tokens, made, every=every, is_answer=is_answer, sampling=sampling, key=key
        )

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        key: KeyLike | None = None,
        **template_arguments: Any,
    ) -> str:
        """Answers messages, formatted by the checkpoint's chat template.

        Args:
          messages: The user's message, or a list of all messages `{"role": ..., "content": ...}`.
          max_new_tokens: Maximum number of tokens of the answer.
          sampling: Sampling settings. Default: greedy.
          key: Random key or seed. Without one, every call draws differently.
          **template_arguments: More variables of the template, such as `enable_thinking`.

        Returns:
          The answer.

        Raises:
          ValueError: If the tokenizer has no chat template, as in base models; also as `generate`.

        Example:
          >>> lm.chat("Who walks?")  # doctest: +SKIP
        """
        tokens = apply_chat_template(self.tokenizer, messages, **template_arguments)
        found = self.complete(
            [tokens], max_new_tokens=max_new_tokens, sampling=sampling, key=key, is_answer=True
        )
        return next(found)[1].text

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        key: KeyLike | None = None,
        max_tokens: int | None = None,
        **template_arguments: Any,
    ) -> "Conversation":
        """Starts a conversation of several turns. Each turn reads only the new tokens.

        Args:
          system: A system message at the start.
          messages: Messages at the start, after the system message.
          max_new_tokens: Maximum number of tokens of an answer.
          sampling: Sampling settings. Default: greedy.
          key: Random key or seed. Default: a fresh one.
          max_tokens: Capacity of the cache in tokens. By default the cache doubles whenever it is
            full.
          **template_arguments: More variables of the template, such as `enable_thinking`.

        Returns:
          The conversation.

        Raises:
          ValueError: If the tokenizer has no chat template, as in base models.

        Example:
          >>> talk = lm.conversation(system="Be brief.")  # doctest: +SKIP
          >>> talk.send("Who walks?")  # doctest: +SKIP
          >>> talk.send("And who draws?")  # doctest: +SKIP
        """
        return Conversation(
            self,
            [*([{"role": "system", "content": system}] if system is not None else []), *messages],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            max_tokens=max_tokens,
            template_arguments=template_arguments,
        )

    def _made(self, max_new_tokens: int, max_tokens: int | None = None) -> Generate:
        """Calls `make_generate` for this model."""
        return make_generate(
            self.model_config,
            self.policy,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self.eos_token_ids,
            phase=self.phase,
            chunk_size=self.chunk_size,
            max_tokens=max_tokens,
        )

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        own = self.model_config.eos_token_ids
        return own if self.eos_token_ids is None else self.eos_token_ids

    def _start(
        self,
        tokens: Int[np.ndarray, "_"],
        made: Generate,
        *,
        every: int,
        is_answer: bool,
        **options: Any,
    ) -> "TextStream":
        """Makes a stream of text; the options are options of a call of `made`."""
        lengths, tokens = np.array([len(tokens)], np.int32), np.asarray(tokens, np.int32)
        call = made.check(self.params, tokens[None], lengths=lengths, to_bucket=True, **options)
        return TextStream(
            Stream(call, self.params, every=every),
            StreamDecoder(self.tokenizer, context=() if is_answer else tokens),
            num_prompt_tokens=len(tokens),
            ends=self._end_tokens,
        )

    def _resolved(
        self, prompts: Sequence[Any], max_new_tokens: int, batch_size: int | None
    ) -> Self:
        """Replaces an `Auto` by its choice for all these prompts."""
        if not isinstance(self.policy, Auto) or not prompts:
            return self
        auto, config = self.policy, self.model_config
        sparse = dataclasses.replace(self, policy=auto.policy(config))
        batch = min(sparse._batch_size(prompts, max_new_tokens, batch_size), len(prompts))
        longest = bucket_length(max(map(len, prompts)), multiple=auto.block_size)
        found = auto.choose(
            config,
            batch=batch,
            tokens=min(longest, config.context_length),
            max_new_tokens=max_new_tokens,
            phase=self.phase,
            is_spread=placement_of(self.params, config) is not None,
        )
        return dataclasses.replace(self, policy=found.policy, phase=found.phase)

    def _batch_size(self, prompts: Sequence[Any], max_new_tokens: int, wanted: int | None) -> int:
        """Returns the requested batch size, or one whose caches fit in half of free memory."""
        if wanted is not None or not prompts:
            return wanted or 1
        size, embedding = MAX_BATCH, self.params["embed"]["embedding"]
        free = free_bytes(embedding)
        if free is None:
            return size
        assert isinstance(self.policy, Policy)
        longest = bucket_length(max(map(len, prompts)), multiple=self.policy.block_size)
        capacity = min(longest + new_token_room(max_new_tokens), self.model_config.context_length)
        one = cache_bytes(self.model_config, self.policy, 1, capacity, embedding.dtype.name)
        while size > 1 and size * one > free // 2:
            size //= 2
        return size


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Groups prompts of similar length into batches.

    Args:
      lengths: Number of tokens of each prompt.
      batch_size: Maximum number of prompts in a batch.

    Returns:
      Indices of the prompts of each batch. The longest come first, so that a lack of memory shows
      early.

    Example:
      >>> batches_by_length([3, 9, 4, 8, 1], 2)
      [[1, 3], [2, 0], [4]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


class TextStream(Iterator[str]):
    """Pieces of a text while it is generated, made by `LanguageModel.stream`.

    Attributes:
      ttft_s: Seconds from the start to the first token, or None before it. This includes the time
        to compile the programs, if necessary.
      tokens: The new tokens so far.
    """

    def __init__(
        self,
        chunks: Stream,
        decoder: StreamDecoder,
        *,
        num_prompt_tokens: int,
        ends: tuple[int, ...],
    ) -> None:
        """Takes a stream of one sequence's tokens that has not been started."""
        self._chunks, self._decoder, self._ends = chunks, decoder, ends
        self._num_prompt_tokens, self._pieces = num_prompt_tokens, list[str]()
        self._density: Density | None = None
        self._is_finite = True
        self._is_over = False
        self._started: float | None = None
        self._first = self._last = 0.0
        self._num_first = 0
        self.ttft_s: float | None = None
        self.tokens: list[int] = []

    def read_prompt(self) -> None:
        """Reads the prompt now. Otherwise the first piece reads it."""
        if self._started is None:
            self._started = time.perf_counter()
            self._take()

    def __next__(self) -> str:
        """Returns the next piece, which is never empty."""
        self.read_prompt()
        while not self._is_over:
            piece = self._take()
            if piece:
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def _take(self) -> str:
        """Returns the text that the next chunk completes; at the end, the text held back."""
        chunk = next(self._chunks, None)
        if chunk is None:
            self._is_over = True
            return self._decoder.finish()
        new = chunk.tokens[0, : int(chunk.lengths[0])].tolist()
        self._density, self._is_finite = chunk.measured_density, bool(chunk.is_finite[0])
        self._last = time.perf_counter()
        if new and not self.tokens:
            assert self._started is not None
            self._first, self._num_first = self._last, len(new)
            self.ttft_s = self._first - self._started
        self.tokens += new
        return self._decoder.push(new)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token, or None if there are none."""
        count = len(self.tokens) - self._num_first
        return count / (self._last - self._first) if count else None

    @property
    def choice(self) -> Choice | None:
        """The choice of an `Auto`, or `None` if a policy was given."""
        return self._chunks.choice

    @property
    def cache(self) -> Cache:
        """The cache of all tokens so far, to continue from. The next piece consumes it."""
        return self._chunks.cache

    @property
    def completion(self) -> Completion:
        """The text so far, as a `Completion`.

        Raises:
          ValueError: If the prompt has not been read yet.
        """
        if self._density is None:
            raise ValueError("the stream must have been started before its completion is read")
        return _completion(
            "".join(self._pieces),
            self._num_prompt_tokens,
            self.tokens,
            self._density,
            ends=self._ends,
            is_finite=self._is_finite,
        )


class Conversation:
    """A conversation of several turns, made by `LanguageModel.conversation`.

    A turn reuses the cache of the previous turn. If the conversation, formatted by the chat
    template, begins with the tokens in the cache, the turn reads only the tokens after them.
    Otherwise (some templates remove old reasoning or strip whitespace), or if the cache has no room
    left, it reads everything again. The answer is the same in both cases. A repetition penalty
    counts the tokens that a turn reads and generates.

    Attributes:
      messages: All messages so far, including the answers. You may change them between turns.
      num_read: Number of tokens that the last turn read. The others were in the cache.
    """

    def __init__(
        self,
        model: LanguageModel,
        messages: Sequence[Message],
        *,
        max_new_tokens: int,
        sampling: Sampling | None,
        key: KeyLike | None,
        max_tokens: int | None,
        template_arguments: Mapping[str, Any],
    ) -> None:
        """Starts the conversation; see `LanguageModel.conversation`."""
        if not model.tokenizer.chat_template:
            raise ValueError(
                "tokenizer must have a chat template, got none: base models have none, continue "
                "their prompts with generate"
            )
        check_integer("max_new_tokens", max_new_tokens)
        check_integer("max_tokens", max_tokens, is_optional=True)
        self.model, self.messages = model, [dict(one) for one in messages]
        self.num_read = 0
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._key, self._turn = _make_key(key, sampling), 0
        self._max_tokens, self._arguments = max_tokens, dict(template_arguments)
        self._cache: Cache | None = None
        self._held: list[int] = []

    def send(self, text: str) -> str:
        """Sends a message and returns the answer.

        Args:
          text: The user's message.

        Returns:
          The answer, which is also added to `messages`.

        Raises:
          ValueError: If the conversation is too long for the model or for `max_tokens`, or the
            template refuses it.
        """
        return "".join(self.stream(text))

    def stream(self, text: str, *, every: int = 4) -> Iterator[str]:
        """Sends a message and yields the answer in pieces, as `LanguageModel.stream` does.

        If you stop early, the pieces so far are kept as the answer.

        Args:
          text: The user's message.
          every: Number of decode steps between two pieces.

        Returns:
          An iterator over pieces of the answer.

        Raises:
          ValueError: In the same cases as `send`, by this call, before the first piece.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        return self._follow(asked, self._read(asked, every=every))

    def _follow(self, asked: list[dict[str, Any]], pieces: TextStream) -> Iterator[str]:
        """Yields the pieces and stores the turn afterwards. A turn that fails is not stored."""
        try:
            yield from pieces
        except GeneratorExit:
            self._keep(asked, pieces)
            raise
        self._keep(asked, pieces)

    def _keep(self, asked: list[dict[str, Any]], pieces: TextStream) -> None:
        answer = {"role": "assistant", "content": pieces.completion.text}
        self.messages = [*asked, answer]
        self._cache, self._turn = pieces.cache, self._turn + 1
        self._held += pieces.tokens

    def _read(self, messages: Sequence[Message], *, every: int) -> TextStream:
        """Starts the answer to messages. Uses the cache if it has their beginning."""
        tokens = apply_chat_template(self.model.tokenizer, messages, **self._arguments).tolist()
        needed, held = len(tokens) + self._max_new_tokens, len(self._held)
        cache, self._cache = self._cache, None
        is_continued = (
            cache is not None
            and needed <= cache.capacity
            and held < len(tokens)
            and tokens[:held] == self._held
        )
        if not is_continued:
            held, cache = 0, None
        made = self.model._made(self._max_new_tokens, None if is_continued else self._room(needed))
        key = None if self._key is None else jax.random.fold_in(self._key, self._turn)
        self._held, self.num_read = tokens, len(tokens) - held
        return self.model._start(
            np.array(tokens[held:], np.int32),
            made,
            every=every,
            is_answer=True,
            sampling=self._sampling,
            key=key,
            cache=cache,
        )

    def _room(self, needed: int) -> int:
        """Returns the size of a new cache, about twice the current need, for later turns."""
        context = self.model.model_config.context_length
        if self._max_tokens is not None:
            return self._max_tokens
        return max(needed, min(max(LEAST_CONVERSATION, 1 << needed.bit_length()), context))


def _make_key(key: KeyLike | None, sampling: Sampling | None) -> Key[Array, ""] | None:
    """Returns the given random key, or a fresh one if tokens are drawn."""
    check_key(key, sampling)
    if key is None:
        return None if sampling is None else jax.random.key(secrets.randbits(32))
    if isinstance(key, int):
        return jax.random.key(key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)


def _completion(
    text: str,
    num_prompt_tokens: int,
    tokens: Sequence[int] | np.ndarray,
    density: Density,
    *,
    ends: tuple[int, ...],
    is_finite: bool,
) -> Completion:
    def share(*phases: str) -> float:
        attended = sum(float(np.sum(getattr(density, f"{one}_pairs"))) for one in phases)
        causal = sum(float(np.sum(getattr(density, f"{one}_causal"))) for one in phases)
        return attended / (len(density.prefill_pairs) * causal) if causal else math.nan

    return Completion(
        text=text,
        prompt_tokens=num_prompt_tokens,
        new_tokens=len(tokens),
        finish_reason="eos" if len(tokens) and int(tokens[-1]) in ends else "length",
        measured_density=share("prefill", "decode"),
        measured_density_prefill=share("prefill"),
        measured_density_decode=share("decode"),
        is_finite=is_finite,
    )
