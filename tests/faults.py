"""Makes small faults in the code, one at a time, and checks whether the tests find them.

    python tests/faults.py                                  # all faults: many hours
    python tests/faults.py --only ties-to-the-higher-index --out found.json
    python tests/faults.py --list                           # their names, files and promises
    python tests/faults.py --check                          # only whether all can still be made

Each fault breaks one promise of ARCHITECTURE.md, CHANGELOG.md or README.md. The script makes it in
a copy of the checkout whose test modules are all recorded as passed. Then it runs the tests that
`.ci/run` would run, nearest modules first, until one fails. That test must pass without the fault;
otherwise it does not count and is left out. Lint and types do not count.

`SKETCHWALK_HOPPER_PYTHON` names the interpreter that runs kernels as compiled, in the emulator,
`SKETCHWALK_REFERENCE_PYTHON` the one for the live comparison; without one, its tests are left out.
With `--out`, an interrupted run continues after the last fault that it finished.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SECONDS = 7200
"""Time limit of a test run. A run that reaches it counts as a missed fault."""

# `.ci/run` runs the long variants of these after every change.
ALWAYS_LONG = [
    path.relative_to(ROOT).as_posix()
    for name in "parity promises memory recompile mismatches readme".split()
    for path in ROOT.glob(f"tests/**/test_{name}.py")
]

# Name of the fault under test; `--check` leaves it out.
MADE = "SKETCHWALK_FAULT"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A replacement in one file that breaks a promise.

    Attributes:
      name: A short name.
      promise: A sentence that says which behaviour breaks.
      file: The path in the project.
      old: Text that occurs once in the file.
      new: The text in its place.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str


# fmt: off
FAULTS = (
    # Kernels as compiled for GPUs: waits and copies.
    Fault("prefill-query-overwritten",
          "The copy of the next queries does not wait until a warpgroup has read the last ones.",
          "pallas_kernels/attention/hopper.py",
          'plgpu.barrier_wait(barriers.queries("freed", warpgroup))', "pass"),
    Fault("linear-slot-filled-early",
          "A decode matmul fills a slot while the tensor cores still read it.",
          "pallas_kernels/decode_matmul/hopper.py",
          "total.wait(in_flight=0)", "pass"),
    Fault("grouped-slot-freed-early",
          "The experts' products free a slot while the tensor cores still read it.",
          "pallas_kernels/expert_matmul/grouped_matmul.py",
          "in_flight=len(sums)", "in_flight=2 * len(sums)"),
    Fault("swiglu-one-copy-early",
          "The SwiGLU kernel reads a vector whose copy may not have ended.",
          "pallas_kernels/decode_matmul/swiglu_quantize.py",
          "{tiling.slots * tiling.vectors - 1};", "{tiling.slots * tiling.vectors};"),
    Fault("ampere-prefill-one-copy-early",
          "Prefill on Ampere reads a tile whose copy may not have ended.",
          "pallas_kernels/attention/attention.py",
          "mma_sync.wait_copies(2 * (self.tiling.stages - 1))",
          "mma_sync.wait_copies(2 * self.tiling.stages - 1)"),
    Fault("ampere-decode-one-copy-early",
          "Decode on Ampere reads keys whose copy may not have ended.",
          "pallas_kernels/decode_attention/decode_attention.py",
          "mma_sync.wait_copies(tiling.stages - 2)",
          "mma_sync.wait_copies(tiling.stages - 1)"),
    Fault("ampere-linear-short-part",
          "On Ampere a decode matmul takes a last part that is shorter than the others for whole.",
          "pallas_kernels/decode_matmul/decode_matmul.py",
          "self._count = arith.minsi(left, _int(tiling.own_steps))",
          "self._count = _int(tiling.own_steps)"),
    Fault("ampere-scores-lanes-forgotten",
          "A softmax denominator of page scores leaves out half of a warp's lanes.",
          "pallas_kernels/page_scores/prompt_scores.py",
          "for distance in (4, 8, 16):\n            total = arith.addf(",
          "for distance in (4, 8):\n            total = arith.addf("),
    Fault("token-lists-no-barrier",
          "A warpgroup reads the factors of a page before the others have written them.",
          "pallas_kernels/top_k/token_lists.py",
          "row_ops.program_barrier()", "pass"),
    Fault("page-scores-without-decay",
          "A page keeps its highest score for ever, instead of losing a share with each token.",
          "pallas_kernels/page_scores/long_token_scores.py",
          "jnp.maximum(_root(sums, exponent), decay * previous)",
          "jnp.maximum(_root(sums, exponent), previous)"),
    Fault("block-scores-not-committed",
          "Page scores are copied out of shared memory before all threads have written them.",
          "pallas_kernels/page_scores/hopper.py",
          "            plgpu.commit_smem()\n            of_group =", "            of_group ="),
    Fault("last-block-not-scored",
          "The last rows of a prompt do not see the block that they are in.",
          "pallas_kernels/page_scores/hopper.py",
          "jax.lax.div(length - 1, SCORED_BLOCK))", "jax.lax.div(length - 1, SCORED_BLOCK) - 1)"),
    Fault("scores-past-the-cache",
          "Kernels write scores of keys that do not fit into the cache.",
          "pallas_kernels/page_scores/api.py",
          "kv_lengths = jnp.minimum(kv_lengths, num_blocks * SCORED_BLOCK)", "pass"),
    Fault("residuals-past-the-pages",
          "Dequantization reads codes of pages that do not exist.",
          "pallas_kernels/page_scores/hopper_dequantize.py",
          "present = arith.select(is_key, key, first)", "present = key"),
    Fault("representatives-not-awaited",
          "Representatives of queries are read before their copy has ended.",
          "pallas_kernels/page_scores/representatives.py",
          'mlir.effect("cp.async.wait_all;")', "pass"),
    Fault("walk-row-overwritten",
          "A warpgroup of the walk writes over numbers that another still reads.",
          "pallas_kernels/walk/walk_row.py",
          "row_ops.barrier()  # all have read what was there", "pass"),
    Fault("block-sums-no-barrier",
          "Sums of a block are added before all threads have written their parts.",
          "pallas_kernels/walk/block_sums.py",
          "    row_ops.barrier()\n    for which, (memory, factor)",
          "    for which, (memory, factor)"),
    # Kernels: their results.
    Fault("minus-zero-below-zero",
          "A score of -0.0 ranks below one of 0.0, so that a tie is broken to the higher index.",
          "pallas_kernels/top_k/select.py",
          "keys = replace(keys, magnitude == 0, 0)", "pass"),
    Fault("token-written-past-the-cache",
          "The token of a full cache is written, over memory of another sequence.",
          "pallas_kernels/key_quantization/token_writes.py",
          "(position < cache.shape[2])", "(position <= cache.shape[2])"),
    Fault("block-codes-one-key-more",
          "The codes of a block that is not full include a key that is not there.",
          "pallas_kernels/key_quantization/quantize_keys.py",
          "_encode(halves, place < left, scratch, sizes=sizes)",
          "_encode(halves, place <= left, scratch, sizes=sizes)"),
    # Selection.
    Fault("budget-rounded-down",
          "A share of the blocks is rounded down, so that a policy keeps less than it says.",
          "sketchwalk_jax/selection.py",
          "-((-share.numerator * rows.astype(object)) // share.denominator)",
          "(share.numerator * rows.astype(object)) // share.denominator"),
    Fault("infinite-score-wins",
          "A score that is infinite ranks highest instead of lowest.",
          "sketchwalk_jax/selection.py",
          "jnp.where(jnp.isfinite(scores), jnp.minimum(scores, _HIGHEST), -LARGEST)",
          "jnp.where(jnp.isnan(scores), -LARGEST, jnp.minimum(scores, _HIGHEST))"),
    Fault("ties-to-the-higher-index",
          "Of blocks with equal scores, the one with the higher index is taken.",
          "sketchwalk_jax/selection.py",
          "_, ids = jax.lax.top_k(ranked, max_count)",
          "ids = jnp.argsort(ranked, axis=-1)[..., ::-1][..., :max_count]"),
    Fault("density-without-the-diagonal",
          "The measured density counts a query's own key as not there.",
          "sketchwalk_jax/selection.py",
          "inside * (inside + 1) // 2", "inside * (inside - 1) // 2"),
    Fault("one-local-page",
          "The recommended policy takes one page by force at each token, not as many as it says.",
          "sketchwalk_jax/policies/recommended.py",
          "local_blocks=self.pages if is_token else local,",
          "local_blocks=1 if is_token else local,"),
    Fault("walk-weights-swapped",
          "The walk mixes a layer's own scores and those that it carries the wrong way round.",
          "sketchwalk_jax/walk.py",
          "(1.0 - beta) * weights_rows + beta * moved",
          "beta * weights_rows + (1.0 - beta) * moved"),
    Fault("padding-in-the-sketch",
          "Padding counts as prompt in the sums of a block.",
          "sketchwalk_jax/sketch.py",
          "x = jnp.where(valid[:, :, None, None], x, 0.0)", "pass"),
    Fault("codes-beside-an-unrounded-zero-point",
          "Keys are quantized relative to a zero point that differs from the one that is stored.",
          "sketchwalk_jax/policies/quantized_keys.py",
          "zero_point = jax.lax.reduce_precision(zero_point, bits.nexp, bits.nmant)", "pass"),
    Fault("decay-dropped",
          "The walk of the recommended policy remembers earlier layers without decay.",
          "sketchwalk_jax/policies/recommended.py",
          "jnp.maximum(scores, self.decay * walk.scores)", "jnp.maximum(scores, walk.scores)"),
    Fault("exponent-changed",
          "Shares of heads and queries are sharpened by another exponent than that of the norm.",
          "sketchwalk_jax/policies/quantized_keys.py",
          "jax.nn.softmax(logits, axis=-1), 0.0) ** exponent",
          "jax.nn.softmax(logits, axis=-1), 0.0) ** (exponent - 1)"),
    Fault("quest-one-bound-twice",
          "Quest's upper bound of a page's scores leaves out its lowest keys.",
          "sketchwalk_jax/policies/quest.py",
          "product(jnp.minimum(grouped, 0), bounds.lowest)",
          "product(jnp.minimum(grouped, 0), bounds.highest)"),
    Fault("weights-of-ranks-not-summed",
          "Attention that ranks share is divided by each rank's own weight, not by their sum.",
          "sketchwalk_jax/policies/ranks.py",
          "total = jax.lax.psum(weight, self.axis)", "total = weight"),
    # Attention, caches and generation.
    Fault("nan-through-a-zero-weight",
          "What lies behind the end of a prompt reaches the result, as NaN times zero.",
          "sketchwalk_jax/attention/xla.py",
          "is_taken = is_real & (position < end[..., None, None])", "is_taken = is_real"),
    Fault("query-heads-interleaved",
          "Query heads read the key/value head of another group.",
          "sketchwalk_jax/attention/xla.py",
          "kv_head = jnp.arange(num_lists, dtype=jnp.int32) // (heads // kv_heads)",
          "kv_head = jnp.arange(num_lists, dtype=jnp.int32) % kv_heads"),
    Fault("gradient-of-an-idle-query",
          "A query that is not finite and that no loss uses makes the gradients of keys NaN.",
          "sketchwalk_jax/attention/gradients.py",
          "query = jnp.where(is_idle[..., None], 0, query)", "pass"),
    Fault("chunk-written-too-early",
          "Rows that do not fit into a cache are written over those of earlier tokens.",
          "sketchwalk_jax/inference/cache.py",
          "begin = jnp.minimum(start[index], capacity - width)", "begin = start[index]"),
    Fault("rope-one-position-late",
          "A generated token's query and key are rotated for the position after its own.",
          "sketchwalk_jax/inference/steps.py",
          "        positions[:, None],\n        (cache, walk),",
          "        positions[:, None] + 1,\n        (cache, walk),"),
    Fault("experts-of-another-layer",
          "Kernels read the experts of the first layer for the tokens of every layer.",
          "models/experts.py",
          "matrices = Groups(layer * count + groups.expert, groups.used)",
          "matrices = Groups(groups.expert, groups.used)"),
    Fault("padding-has-experts",
          "Padding chooses experts and gets their outputs.",
          "models/experts.py",
          "experts = jnp.where(is_token.reshape(-1, 1), experts, count)", "pass"),
    Fault("weights-of-experts-not-normalised",
          "The weights of a token's experts do not add up to 1 in a model that says so.",
          "models/experts.py",
          "if model_config.norm_topk_prob:", "if False:"),
    Fault("cache-copied",
          "A decode step copies the cache that it was given, which takes the memory twice.",
          "sketchwalk_jax/inference/steps.py",
          '_decode = jax.jit(decode_token, static_argnames=("settings",), donate_argnames="cache")',
          '_decode = jax.jit(decode_token, static_argnames=("settings",))'),
    Fault("lengths-checked-after-padding",
          "A length above that of the prompts is accepted, and padding is read as prompt.",
          "sketchwalk_jax/inference/generation.py",
          """\
        lengths = check_prompt(tokens, lengths, model_config)
        if to_bucket:
            size, context = settings.policy.block_size, model_config.context_length
            tokens = pad_to_bucket(tokens, multiple=size, context_length=context)
""",
          """\
        if to_bucket:
            if lengths is None:
                lengths = np.full(len(tokens), tokens.shape[1], np.int32)
            size, context = settings.policy.block_size, model_config.context_length
            tokens = pad_to_bucket(tokens, multiple=size, context_length=context)
        lengths = check_prompt(tokens, lengths, model_config)
"""),
    Fault("one-end-token",
          "Only the first of several end tokens ends a sequence.",
          "sketchwalk_jax/inference/generation.py",
          "eos = jnp.asarray(eos_token_ids, jnp.int32)",
          "eos = jnp.asarray(eos_token_ids[:1], jnp.int32)"),
    Fault("decode-compiled-per-chunk-size",
          "Another chunk size of the prompt compiles the program of a generated token again.",
          "sketchwalk_jax/inference/generation.py",
          '"settings": dataclasses.replace(settings, chunk_size=None, return_selection=False),',
          '"settings": settings,'),
    Fault("budget-compiled-in",
          "Another density compiles the programs again.",
          "sketchwalk_jax/policies/base.py",
          "return dataclasses.replace(self, density=density), table",
          "return self, table"),
    Fault("padding-attends",
          "Rows of padding attend to keys, which takes time and counts as density.",
          "sketchwalk_jax/inference/cached_layer.py",
          "counts = jnp.where(num_queries[:, None] > 0, lists.counts, 0)",
          "counts = lists.counts"),
    Fault("columns-left-out",
          "Fewer columns are computed than a prompt has.",
          "sketchwalk_jax/inference/steps.py",
          "return Widths(columns, index, max(size, most // batch))",
          "return Widths(columns, jnp.maximum(index - 1, 0), max(size, most // batch))"),
    Fault("damaged-program-loaded",
          "A damaged file of a program is loaded.",
          "sketchwalk_jax/inference/compiled.py",
          "if raw[:head] != _MAGIC or hashlib.sha256(content).digest() != digest:",
          "if raw[:head] != _MAGIC:"),
    Fault("program-of-other-code",
          "A program of another version of the package is loaded.",
          "sketchwalk_jax/inference/compiled.py",
          "machine = (described, _settings(), _code_here(), _environment(device))",
          "machine = (described, _settings(), _environment(device))"),
    Fault("folder-of-others-trusted",
          "Programs are loaded from a folder that others can write.",
          "sketchwalk_jax/inference/compiled.py",
          "others = stat.S_IWGRP | stat.S_IWOTH",
          "others = 0"),
    Fault("neighbour-not-finite",
          "Logits of one sequence that are not finite mark all sequences of its batch.",
          "sketchwalk_jax/inference/generation.py",
          "is_finite=jnp.all(jnp.isfinite(logits), axis=-1),",
          "is_finite=jnp.broadcast_to(jnp.all(jnp.isfinite(logits)), (batch,)),"),
    Fault("rows-of-another-sequence",
          "`return_selection` counts a row too much where sequences of a batch begin apart.",
          "sketchwalk_jax/inference/calls.py",
          "return -(-int(np.max(inside + longest)) // block_size)",
          "return -(-int(np.max(inside) + np.max(longest)) // block_size)"),
    Fault("memory-without-the-statistics",
          "The estimate of memory counts keys and values, but no statistics of the policy.",
          "sketchwalk_jax/inference/calls.py",
          "for _, shape, own in arrays)", "for _, shape, own in arrays[:2])"),
    Fault("top-p-one-token-more",
          "Top-p keeps a token although those before it have the whole mass already.",
          "sketchwalk_jax/inference/sampling.py",
          "mass_above < top_p * mass[:, :1]", "mass_above <= top_p * mass[:, :1]"),
    # Checkpoints, tokenizers and text.
    Fault("gguf-bias-not-permuted",
          "Biases of queries and keys keep the order of rotated pairs that GGUF files have.",
          "models/gguf_files.py",
          '_PERMUTED = (".attn_q.weight", ".attn_q.bias", ".attn_k.weight", ".attn_k.bias")',
          '_PERMUTED = (".attn_q.weight", ".attn_k.weight")'),
    Fault("tied-head-compared-in-part",
          "A head that differs from the embedding in late rows is taken for tied.",
          "models/weights.py",
          "for start in range(0, num_rows, ROWS_PER_READ):",
          "for start in range(0, min(num_rows, ROWS_PER_READ), ROWS_PER_READ):"),
    Fault("transposed-tensor-accepted",
          "A tensor of a checkpoint is accepted if only its size is right.",
          "models/weights.py",
          "if name in headers and headers[name].shape != shape",
          "if name in headers and math.prod(headers[name].shape) != math.prod(shape)"),
    Fault("scales-of-another-matrix",
          "Quantized rows of the up projection are scaled like those of the gate.",
          "models/quantized.py",
          "_scaled(up, row_scales, up_scales, up.dtype)",
          "_scaled(up, row_scales, gate_scales, up.dtype)"),
    Fault("context-not-stretched",
          "A checkpoint with YaRN is held to the context from before it was stretched.",
          "models/hf_config.py",
          'context = fields["rope"].stretched_context(fields["max_position_embeddings"])',
          'context = fields["max_position_embeddings"]'),
    Fault("plan-without-the-last-bytes",
          "A plan is accepted for a checkpoint that differs only at the end of a file.",
          "models/plans.py",
          "file.seek(index * (size - _PIECE_BYTES) // (_PIECES - 1))",
          "file.seek(index * (size - _PIECE_BYTES) // _PIECES)"),
    Fault("plan-measured-at-the-minimum",
          "Layers are measured where rows keep a minimum of keys at every density.",
          "sketchwalk_jax/evaluation/planning.py",
          "        min_tokens=(first, second),\n",
          ""),
    Fault("two-start-tokens",
          "A chat gets a second start token beside that of its template.",
          "sketchwalk_jax/text/tokenizer.py",
          "return encode(tokenizer, text, add_special_tokens=False)",
          "return encode(tokenizer, text)"),
    Fault("stream-loses-its-end",
          "A stream drops the text that it holds back when the last token arrives.",
          "sketchwalk_jax/language_model.py",
          "return self._decoder.finish()", 'return ""'),
    Fault("bytes-read-as-tokens",
          "A prompt of bytes is read as a list of token IDs instead of refused.",
          "sketchwalk_jax/validation.py",
          "if isinstance(value, bytes) or not isinstance(value, Sequence):",
          "if not isinstance(value, Sequence):"),
    # The command line, evaluation, pages and benchmarks.
    Fault("kept-texts-not-counted",
          "Who stops a continued run of `generate --prompts` is told that fewer texts are kept.",
          "sketchwalk_jax/cli/prompt_files.py",
          "self.num_texts = len(done)", "self.num_texts = 0"),
    Fault("plan-overwritten",
          "`calibrate` writes over a plan without being told to.",
          "sketchwalk_jax/cli/calibrate.py",
          "if path.exists() and not overwrite:", "if not path.exists() and overwrite:"),
    Fault("results-with-two-plans",
          "Rows of an evaluation that were measured without a plan are continued with one.",
          "sketchwalk_jax/evaluation/results.py",
          "if there != now:", "if there is not None and there != now:"),
    Fault("measured-number-out-of-date",
          "A table of the README shows a number that was not measured.",
          "README.md",
          "| 131,072 | ", "| 131,072 | 9"),
    Fault("timed-beside-compilation",
          "A benchmark measures while programs of the next rows still compile.",
          "benchmarks/common.py",
          "pool.shutdown(wait=True, cancel_futures=True)",
          "pool.shutdown(wait=False, cancel_futures=True)"),
)
# fmt: on


def wrong_faults(faults: Sequence[Fault]) -> list[str]:
    """Returns a sentence for each fault whose `old` does not occur exactly once in its file."""
    names = [fault.name for fault in faults]
    found = [f"two faults are named {name}" for name in set(names) if names.count(name) > 1]
    for fault in faults:
        path = ROOT / fault.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(fault.old)) != 1:
            found.append(f"{fault.name}: {fault.file} has {count} times, not once: {fault.old}")
    return found


@dataclasses.dataclass(frozen=True)
class Step:
    """A test run: the arguments of pytest, and whether kernels run as compiled."""

    arguments: list[str]
    is_compiled: bool = False


class Copy:
    """A copy of the checkout in which one fault is made.

    Attributes:
      folder: The copy.
      work: Another folder, for caches of tests.
      environment: Environment variables of its tests.
    """

    def __init__(self, source: Path, work: Path, fault: Fault, programs: Path) -> None:
        """Copies the folder that `record` filled, and makes the fault."""
        self.folder, self.work, self._runs = work / "copy", work, 0
        shutil.copytree(source, self.folder, symlinks=True)
        # Scripts that tests start would import the installed package.
        self.environment = {**environment(), "PYTHONPATH": str(self.folder), MADE: fault.name}
        self.environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
        self.environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        code = "import sketchwalk_jax; print(sketchwalk_jax.__file__)"
        imported = Path(self.call(sys.executable, "-c", code).strip())
        if not imported.resolve().is_relative_to(self.folder.resolve()):
            raise RuntimeError(f"tests of the copy would import {imported}")
        self._path = self.folder / fault.file
        self._whole = self._path.read_bytes()
        self._broken = self._whole.decode().replace(fault.old, fault.new).encode()
        self._path.write_bytes(self._broken)

    def call(self, *command: str) -> str:
        """Runs a command in the copy; returns its output."""
        return call(command, self.folder, self.environment)

    def failures(self, step: Step) -> list[str]:
        """Runs tests; returns the IDs of the failed ones, as pytest's cache names them.

        Raises:
          RuntimeError: If pytest ended in another way than with passed or failed tests.
        """
        self._runs += 1
        cache = self.work / f"cache{self._runs}"
        interpreter, variables = sys.executable, self.environment
        if step.is_compiled:
            interpreter = variables["SKETCHWALK_HOPPER_PYTHON"]
            variables = {**variables, "SKETCHWALK_COMPILED_KERNELS": "1"}
        command = [interpreter, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *step.arguments]
        status, printed = run(command, self.folder, variables)
        file = cache / "v" / "cache" / "lastfailed"
        failed = list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
        # 0: all passed; 5: no tests. 1: some failed; 2: also where `-x` ended several processes.
        if status not in (0, 5) and not (status in (1, 2) and failed):
            raise RuntimeError(f"pytest ended with status {status}:\n{printed[-2000:]}")
        return failed

    def passes_without_fault(self, test: str, is_compiled: bool) -> bool:
        """Says whether a test passes alone, or a module can be collected, without the fault."""
        only_collect = [] if "::" in test else ["--collect-only"]
        self._path.write_bytes(self._whole)
        try:
            step = Step([test, "-n", "0", "-m", "not weekly", *only_collect], is_compiled)
            return not self.failures(step)
        except RuntimeError:
            return False
        finally:
            self._path.write_bytes(self._broken)


def run(command: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[int | None, str]:
    """Runs a command; returns its exit status, or None after a timeout, and its output."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=SECONDS)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            return None, f"it did not end within {SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def call(command: Sequence[str], folder: Path, variables: dict[str, str]) -> str:
    """Runs a command that must succeed; returns its output."""
    status, printed = run(command, folder, variables)
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{printed}")
    return printed


def environment() -> dict[str, str]:
    """Returns this process's environment variables, with caching of bytecode on."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def record(folder: Path) -> None:
    """Copies all files that git does not ignore, and records all test modules as passed."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, call(listed, ROOT, environment()).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    who = ("-c", "user.name=faults", "-c", "user.email=faults@localhost")
    for command in (
        ("git", "init", "--quiet"),
        (sys.executable, ".ci/checks.py", "--record"),
        ("git", "add", "--all"),
        ("git", *who, "commit", "--quiet", "--no-verify", "--message", "Record all modules"),
    ):
        call(command, folder, environment())


def steps(plan: str, fault: Fault, has_emulator: bool) -> Iterator[Step]:
    """Returns the test runs of `.ci/run`, those most likely to find the fault first.

    Parallel workers do not keep the order of modules, so stale ones run in growing groups.
    """
    lines = re.findall(r"^(\S+\.py) \((?:long|default)( emulated)?\)", plan, re.M)
    stale = [module for module, _ in lines]
    emulated = [module for module, mark in lines if mark and has_emulator]

    compiled = [
        Step(["-x", "-n", "2", "-m", "not weekly", *group], is_compiled=True)
        for group in groups(emulated)
    ]
    if fault.file.startswith("pallas_kernels/"):
        yield from compiled
    for group in groups(stale):
        # The emulator already runs the long variants of kernels; the interpreter would repeat them.
        if default := [module for module in group if module in emulated]:
            yield Step(["-x", *default])
        if long := [module for module in group if module not in emulated]:
            yield Step(["-x", "-m", "not weekly", *long])
    yield Step(["-x", *(f"--ignore={module}" for module in stale)])
    if long := [module for module in ALWAYS_LONG if module not in stale]:
        yield Step(["-x", "-m", "slow", *long])
    if not fault.file.startswith("pallas_kernels/"):
        yield from compiled


def groups(modules: list[str]) -> Iterator[list[str]]:
    """Yields the first module, the next two, the next four, and so on."""
    start, size = 0, 1
    while start < len(modules):
        yield modules[start : start + size]
        start, size = start + size, 2 * size


def find(fault: Fault, copy: Copy) -> tuple[str, str]:
    """Runs the tests of a copy; returns the test that found the fault or "", and a remark."""
    plan = copy.call(sys.executable, ".ci/checks.py")
    unrelated: list[str] = []
    for step in steps(plan, fault, "SKETCHWALK_HOPPER_PYTHON" in copy.environment):
        while True:
            without = [f"--{'deselect' if '::' in x else 'ignore'}={x}" for x in unrelated]
            try:
                failed = copy.failures(Step([*step.arguments, *without], step.is_compiled))
            except RuntimeError as error:
                return "", str(error)
            if not failed:
                break
            for test in failed:
                if copy.passes_without_fault(test, step.is_compiled):
                    kind = "" if "::" in test else "its collection"
                    return test, "as compiled" if step.is_compiled else kind
            if set(failed) <= set(unrelated):
                return "", f"{', '.join(failed)} cannot be left out"
            unrelated += failed
    return "", f"left out: {', '.join(unrelated)}" if unrelated else ""


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--check", action="store_true", help="only whether all can be made")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="what was found so far")
    given = parser.parse_args()

    chosen = [fault for fault in FAULTS if fault.name in given.only]
    if given.list:
        for fault in chosen:
            print(f"{fault.name} ({fault.file}): {fault.promise}")
        return
    made = os.environ.get(MADE)
    if wrong := wrong_faults([fault for fault in chosen if fault.name != made]):
        sys.exit("\n".join(wrong))
    if given.check:
        return

    rows: list[dict[str, str | float]] = []
    if given.out and given.out.exists():
        rows = json.loads(given.out.read_text(encoding="utf-8"))
    known = {row["name"] for row in rows}
    left = [fault for fault in chosen if fault.name not in known]
    if left and "SKETCHWALK_HOPPER_PYTHON" not in os.environ:
        print("SKETCHWALK_HOPPER_PYTHON is not set: no kernel runs as compiled")
    with tempfile.TemporaryDirectory() as shared:
        source, programs = Path(shared, "source"), Path(shared, "programs")
        source.mkdir()
        if left:
            record(source)
        for fault in left:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                test, remark = find(fault, Copy(source, Path(folder), fault, programs))
            seconds = round(time.monotonic() - began)
            found = f"caught by {test} in" if test else "MISSED after"
            print(f"{fault.name}: {found} {seconds} s{remark and f' ({remark})'}", flush=True)
            row = {"name": fault.name, "file": fault.file, "caught_by": test, "remark": remark}
            rows.append({**row, "seconds": seconds})
            if given.out:
                new = given.out.with_name(given.out.name + ".new")
                new.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
                new.replace(given.out)
    caught = {row["name"] for row in rows if row["caught_by"]} & set(given.only)
    print(f"caught {len(caught)} of {len(chosen)}")
    sys.exit(len(caught) < len(chosen))


if __name__ == "__main__":
    main()
