r"""Runs the lm-evaluation-harness on this package's models: every policy, phase and density.

    pip install "sketchwalk-jax[eval]"
    python -m sketchwalk_jax.evaluation.harness run --model sketchwalk \
        --model_args pretrained=DIR,policy=quest,density=0.2 --tasks niah_single_1

The second command runs the harness's command line, `lm-eval`, with this model registered. From
Python: `lm_eval.simple_evaluate(model=SketchWalkLM("DIR", policy="quest"), tasks=[...])`.
"""

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from sketchwalk_jax.calibration import calibrate, fit_thresholds
from sketchwalk_jax.evaluation.calibrated_rules import held_out_prompts
from sketchwalk_jax.evaluation.measure import prefill_program
from sketchwalk_jax.inference.cache import Density, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.generation import make_generate
from sketchwalk_jax.inference.padding import bucket_length, pad_right, pad_to_bucket
from sketchwalk_jax.inference.sampling import Sampling
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.policies import by_name, changed_fields, has_threshold, with_plan
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.text.haystack import read_text
from sketchwalk_jax.text.tokenizer import decode, encode, load_tokenizer
from sketchwalk_jax.validation import check_choice

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "the lm-evaluation-harness must be installed for this module: "
        'pip install "sketchwalk-jax[eval]"'
    ) from error

PyTree = Any
TRUNCATIONS = ("left", "middle")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_TOKENS_OF_KEYS = 8192  # quartiles of keys depend little on the length
_TARGETS = 256  # tokens of a sequence whose logits are in memory at a time
_log = logging.getLogger(__name__)


@register_model("sketchwalk")
class SketchWalkLM(TemplateLM):
    """A checkpoint with a policy, behind the harness's model interface.

    `make_generate` generates text: the prompt is prefilled, the answer decoded, and `phase` says
    which of the two is sparse. Log-likelihoods come from one prefill of context and continuation; a
    policy that is dense in prefill is refused there.

    Attributes:
      params: Parameter tree.
      model_config: The model.
      policy: The policy that runs, its thresholds set.
      tokenizer: The checkpoint's tokenizer.
      max_length: Most tokens of prompt and answer together.
      max_gen_toks: Most tokens to generate, unless a task sets its own limit.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        tokenizer: str | None = None,
        policy: str = "sketchwalk",
        preset: str | None = None,
        density: float | None = None,
        phase: str = "both",
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        truncation: str = "left",
        chunk_size: int | None = None,
        implementation: str | None = None,
        calibration_tokens: int | None = None,
        seed: int = 0,
        device: str | None = None,
        **fields: Any,
    ) -> None:
        """Loads the checkpoint, and calibrates the policy to its density if it needs the model.

        The arguments are the harness's `model_args`.

        Args:
          pretrained: Checkpoint directory or GGUF file.
          tokenizer: Directory or GGUF file of another tokenizer.
          policy: One of `sketchwalk_jax.policies.POLICIES`.
          preset: Preset of the `sketchwalk` policy; `recommended` takes the checkpoint's plan.
          density: Density to select at. MInference and FlexPrefill, which have no such field, are
            calibrated to it on held-out prompts, never on a task's; without it they run as
            published.
          phase: Phase in which selection is sparse: `"both"`, `"prefill"` or `"decode"`.
          dtype: Type of weights and cache; float32 on CPUs, elsewhere the checkpoint's, by default.
          batch_size: Prompts at a time.
          max_length: Most tokens of prompt and answer; the model's context by default.
          max_gen_toks: Most tokens to generate, unless a task sets its own limit.
          truncation: The part that longer prompts lose: their beginning (`"left"`) or their
            `"middle"`, as in LongBench.
          chunk_size: Tokens that prefill processes at a time.
          implementation: Attention implementation, or `None` to choose.
          calibration_tokens: Length of the prompts for calibration, from a text of 455,000
            characters; `max_length` by default.
          seed: Seed of sampling.
          device: Ignored: the harness always passes it, but `JAX_PLATFORMS` chooses the device.
          **fields: Further fields of the policy, such as `block_size`. If `thresholds` of Adamas
            are not given, they are fitted to the model's keys.

        Raises:
          ValueError: For arguments that do not fit the policy, the checkpoint or their range.
        """
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
        check_choice("truncation", truncation, TRUNCATIONS)
        fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        own = None if has_threshold(by_name(policy, preset=preset)) else density
        self.policy = by_name(policy, preset=preset, density=own, **fields)
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"  # CPUs are slow in 16 bits
        self.tokenizer = load_tokenizer(tokenizer or pretrained)
        self.params, self.model_config = load(pretrained, dtype=dtype)
        if "plan" not in fields:
            self.policy = with_plan(self.policy, self.model_config.plan)
        context = self.model_config.context_length
        self.max_length = max_length or context
        if not 1 < self.max_length <= context:
            raise ValueError(
                f"max_length must be from 2 to the model's context of {context} tokens, got "
                f"{max_length}; rope scaling in config.json stretches it"
            )
        self.max_gen_toks, self.batch_size = max_gen_toks, int(batch_size)
        self._name, self._phase = str(pretrained), phase
        self._truncation, self._key = truncation, jax.random.key(seed)
        self._options: dict[str, Any] = {"chunk_size": chunk_size, "implementation": implementation}
        self._settings()  # which checks them
        if "thresholds" not in fields:
            self._set_by_model(density, num_tokens=calibration_tokens or self.max_length)
        self.reset_density()

    def _set_by_model(self, density: float | None, *, num_tokens: int) -> None:
        """Calibrates the policy to a density, or fits Adamas, on prompts that no task has.

        Calibration takes two prompts of one length: English text, and a question about codes hidden
        in such text, because policies keep more of a prompt that ends in a question. The thresholds
        of Adamas take the text alone, at most 8,192 tokens.
        """
        policy, tasks = self.policy, ["text_loss"]
        if isinstance(policy, AdamasConfig):
            num_tokens = min(num_tokens, _MAX_TOKENS_OF_KEYS)
        elif isinstance(policy, PrefillPolicy) and density is not None:
            tasks.append("multi_key")
        else:
            return
        options: dict[str, Any] = {"policy": policy, "model_config": self.model_config}
        prompts = held_out_prompts(read_text(), self.tokenizer, tasks=tasks, num_tokens=num_tokens)
        if isinstance(policy, AdamasConfig):
            self.policy = fit_thresholds(self.params, *prompts, **options)
            return
        found = calibrate(self.params, *prompts, batch=1, **options | {"density": density})
        _log.info("%s: density %.3f on held-out prompts", found.settings, found.density)
        self.policy = found.policy

    def _settings(self) -> Settings:
        return Settings(
            model_config=self.model_config, policy=self.policy, phase=self._phase, **self._options
        )

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return (*self.model_config.eos_token_ids, self.tokenizer.eos_token_id)[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: beginning-of-sequence, else end-of-sequence."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encodes a text; adds the tokenizer's special tokens by default, never twice."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return encode(self.tokenizer, string, add_special_tokens=add_special_tokens).tolist()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation with the checkpoint's template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def reset_density(self) -> None:
        """Restarts the count of attended pairs."""
        zeros = np.zeros(self.model_config.num_layers)
        self._pairs = {phase: (zeros, 0.0) for phase in ("prefill", "decode")}

    def _count(self, density: Density, rows: int) -> None:
        for phase, (attended, causal) in self._pairs.items():
            pairs = np.asarray(getattr(density, f"{phase}_pairs"), np.float64)[:, :rows]
            new = np.asarray(getattr(density, f"{phase}_causal"), np.float64)[:rows]
            self._pairs[phase] = attended + pairs.sum(1), causal + float(new.sum())

    def measured_density(self) -> dict[str, dict[str, float]]:
        """Returns the density since `reset_density`, by phase, for sparse and all layers."""
        sparse = list(sparse_layers(self.model_config, self.policy))
        found = {}
        for phase, (attended, causal) in self._pairs.items():
            if causal:
                parts = {"sparse_layers": attended[sparse], "all_layers": attended}
                found[phase] = {
                    name: float(x.mean() / causal) for name, x in parts.items() if len(x)
                }
        return found

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes into its results in addition to `model_args`."""
        return {
            "policy": type(self.policy).__name__,
            "policy_fields": changed_fields(self.policy),
            "phase": self._phase,
            "measured_density": self.measured_density(),
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues prompts up to stop strings, end tokens, or `max_gen_toks`.

        Args:
          requests: Requests with arguments `(context, gen_kwargs)`.
          disable_tqdm: Whether to hide the progress bar.

        Returns:
          The generated texts, cut before the first stop string.

        Raises:
          ValueError: For generation options that are not supported.
        """
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        options = [
            GenerationOptions.read(normalize_gen_kwargs(request.args[1], self.max_gen_toks))
            for request in requests
        ]
        answers, bar = [""] * len(requests), self._bar(len(requests), disable_tqdm)
        for option in dict.fromkeys(options):
            generate = make_generate(
                self.model_config,
                self.policy,
                max_new_tokens=option.max_new_tokens,
                phase=self._phase,
                **self._options,
            )
            places = [place for place, one in enumerate(options) if one == option]
            fitted = {i: self._fit_prompt(prompts[i], option.max_new_tokens) for i in places}
            places.sort(key=lambda i: len(fitted[i]), reverse=True)
            for some, rows in batches(places, self.batch_size):
                tokens, lengths = pad_right([fitted[i] for i in rows])
                self._key, key = jax.random.split(self._key)
                sampling = Sampling(**dict(option.sampling))
                out = generate(self.params, tokens, lengths=lengths, sampling=sampling, key=key)
                self._count(out.measured_density, len(some))
                if not np.all(np.asarray(out.is_finite)[: len(some)]):
                    warnings.warn(
                        "logits were NaN or infinite, so some answers mean nothing", stacklevel=2
                    )
                counts = np.asarray(out.lengths)
                for i, new, count in zip(some, np.asarray(out.tokens), counts, strict=False):
                    text = decode(self.tokenizer, new[:count])
                    answers[i] = option.cut(text)
                    self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                bar.update(len(some))
        bar.close()
        return answers

    def _fit_prompt(self, tokens: list[int], max_new_tokens: int) -> list[int]:
        room = self.max_length - max_new_tokens
        if room < 1 or not tokens:
            raise ValueError(
                "a prompt must hold a token and leave room for the answer, got "
                f"{len(tokens)} tokens, with {max_new_tokens} to generate in a max_length of "
                f"{self.max_length}"
            )
        if len(tokens) <= room:
            return tokens
        _log.warning("a prompt of %d tokens is cut to %d (%s)", len(tokens), room, self._truncation)
        head = room // 2 if self._truncation == "middle" else 0
        return tokens[:head] + tokens[head - room :]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        is_dense = not self.policy.phases
        if not is_dense and ("prefill" not in self.policy.phases or self._phase == "decode"):
            raise NotImplementedError(
                f"log-likelihoods must be taken with a policy that selects in prefill, or densely: "
                f"they read all tokens at once, where {type(self.policy).__name__} in phase "
                f"{self._phase!r} is dense; use policy=dense, or tasks that generate"
            )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        bar = self._bar(len(requests), disable_tqdm)
        places = [place for place, request in enumerate(requests) if request[2]]
        places.sort(key=lambda i: len(requests[i][1]) + len(requests[i][2]), reverse=True)
        for some, rows in batches(places, self.batch_size):
            given = [(requests[i][1] + requests[i][2])[-self.max_length - 1 :] for i in rows]
            wanted = [requests[i][2][1 - len(x) :] for i, x in zip(rows, given, strict=True)]
            tokens, lengths = pad_right([one[:-1] for one in given])
            padded = pad_to_bucket(
                tokens,
                multiple=self.policy.block_size,
                context_length=self.model_config.context_length,
            )
            sums, is_best, density = score_continuations(
                self.params, padded, lengths, wanted, settings=self._settings()
            )
            self._count(density, len(some))
            for row, i in enumerate(some):
                found[i] = sums[row], is_best[row]
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
            bar.update(len(some))
        bar.close()
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes log-likelihoods of whole texts, in windows of `max_length` tokens.

        Args:
          requests: Requests with arguments `(text,)`.
          disable_tqdm: Whether to hide the progress bar.

        Returns:
          One sum in nats for each text.

        Raises:
          NotImplementedError: If the policy is dense in prefill.
        """
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found = self._loglikelihood_tokens(parts, disable_tqdm=disable_tqdm)
            sums.append(sum(logprob for logprob, _ in found))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def _bar(self, total: int, is_off: bool) -> tqdm:
        return tqdm(total=total, desc=f"{type(self.policy).__name__}", disable=is_off)


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Options for continuing a prompt.

    Attributes:
      max_new_tokens: Most tokens to generate.
      until: Strings that end the text.
      sampling: Names and values for `Sampling`.
    """

    max_new_tokens: int
    until: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "GenerationOptions":
        """Reads the harness's options, already normalised.

        Raises:
          ValueError: For an option that is not supported.
        """
        rest = dict(options)
        until, count = rest.pop("until"), rest.pop("max_gen_toks")
        is_drawn = rest.pop("do_sample")
        given = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
        rest = {name: value for name, value in rest.items() if value is not None}
        if rest:
            raise ValueError(
                "generation_kwargs must be among until, max_gen_toks, do_sample, "
                f"{', '.join(_SAMPLING)}, got {sorted(rest)}"
            )
        if not is_drawn:
            given = {"temperature": 0.0} | {
                name: value for name, value in given.items() if name == "repetition_penalty"
            }
        return cls(count, tuple(until), tuple(sorted(given.items())))

    def cut(self, text: str) -> str:
        """Cuts a text before the first stop string."""
        for stop in filter(None, self.until):
            text = text.split(stop)[0]
        return text


def batches(places: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields batches of indices, and each batch padded to `size` by repeating its last index.

    Example:
      >>> list(batches([4, 7, 1], 2))
      [([4, 7], [4, 7]), ([1], [1, 1])]
    """
    for start in range(0, len(places), size):
        some = list(places[start : start + size])
        yield some, some + some[-1:] * (size - len(some))


def score_continuations(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    continuations: Sequence[Sequence[int]],
    *,
    settings: Settings,
) -> tuple[list[float], list[bool], Density]:
    """Computes log-likelihoods of the last tokens of sequences, each given all tokens before it.

    Args:
      params: Parameter tree.
      tokens: The sequences without their last token, right-padded.
      lengths: Tokens of each.
      continuations: The tokens to score, the last one included.
      settings: Model and policy. Everything is prefilled, so only prefill is sparse.

    Returns:
      Sums in nats, whether every token is the likeliest, and the attended pairs of the prefill.
    """
    targets, counts = pad_right(continuations)
    room = bucket_length(targets.shape[1], multiple=16)
    targets = np.pad(targets, ((0, 0), (0, room - targets.shape[1])))
    columns = (lengths - counts)[:, None] + np.arange(room, dtype=np.int32)[None, :]
    arrays = (jnp.asarray(one, jnp.int32) for one in (tokens, lengths, columns, targets))
    options: dict[str, Any] = {"settings": settings, "columns_at_a_time": _TARGETS}
    (likeliest, losses), cache = prefill_program(params, *arrays, **options)
    logprobs, is_best = -np.asarray(losses, np.float64), np.asarray(likeliest) == targets
    rows = list(enumerate(counts.tolist()))
    return (
        [float(logprobs[row, :count].sum()) for row, count in rows],
        [bool(is_best[row, :count].all()) for row, count in rows],
        cache.density,
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
