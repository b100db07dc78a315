"""`sketchwalk demo`: asks dense attention and Sketch-and-Walk for facts hidden in a long text.

All answers appear side by side on standard output, with those of rivals if requested; a picture
shows the blocks that Sketch-and-Walk attended to and the blocks with facts.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sketchwalk_jax import plots
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import NOT_FINITE, UsageError, usage_errors
from sketchwalk_jax.cli.options import METHOD, TEXT, field
from sketchwalk_jax.evaluation.wording import code_question, code_statement
from sketchwalk_jax.inference.cache import Cache, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.generation import Stream, StreamChunk, stream
from sketchwalk_jax.inference.padding import pad_right
from sketchwalk_jax.language_model import LanguageModel
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.policies import POLICIES, PRESETS, Policy, by_name, takes_density
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.progress import elapsed
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.text.tokenizer import decode, encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OWN = "Sketch-and-Walk"
TOKENS, FACTS = 8192, 4
RIVALS = tuple(name for name in POLICIES if name not in ("dense", "sketchwalk"))
_PICTURES = (".png", ".pdf", ".svg")

SOURCE = "Python's help topics"
MAX_FACTS = 16
TOKENS_PER_FACT = 128  # least text around a fact, in tokens
QUESTION_TOKENS, ANSWER_TOKENS = 48, 16  # most tokens of each
ROOM = QUESTION_TOKENS + ANSWER_TOKENS

# Words that are held out from the training of the bundled model.
WORDS = tuple(
    "attic badger bakery basket bicycle bottle button cabbage canoe carpet carrot castle cherry "
    "cotton curtain donkey duck fountain galaxy garden garlic honey island jacket meteor mirror "
    "moth onion otter parcel pepper poplar pumpkin ribbon river robin rudder scarf silver spider "
    "squirrel station thistle village violin walnut wardrobe whistle".split()
)


@dataclasses.dataclass(kw_only=True)
class Demo(options.Command):
    """Hide facts in a long text and ask for them, with dense attention and with Sketch-and-Walk.

    Each reads the text once, then answers every question from there. The text is English prose from
    Python's own help. A picture shows which blocks Sketch-and-Walk attended to.
    """

    preset: str = field(
        "--preset NAME",
        f"Variant of Sketch-and-Walk: {', '.join(PRESETS)}.",
        METHOD,
        value=PRESETS[0],
    )
    rivals: list[str] | None = field(
        "--policy NAME",
        f"Another policy to set beside them, at the same density: {', '.join(RIVALS)}. May be "
        "given several times.",
        METHOD,
        "none",
    )
    density: float | None = options.DENSITY
    phase: str = options.PHASE
    mesh: str | None = options.MESH
    tokens: int | None = field(
        "--tokens N",
        "Tokens of text, question and answer together.",
        TEXT,
        f"{TOKENS}, or the model's context if that is shorter",
    )
    facts: int = field("--facts N", "Facts to hide.", TEXT, min=1, max=MAX_FACTS, value=FACTS)
    seed: int = field(
        "--seed N", "Seed of the passage, of the facts and of their places.", TEXT, min=0, value=0
    )
    out: Path = field(
        "--out FILE", f"The picture; {', '.join(_PICTURES)}.", value=Path("sketchwalk-demo.png")
    )
    no_plot: bool = field("--no-plot", "Draw no picture.")
    as_json: bool = field("--json", "Print one JSON object instead.")

    def run(self) -> None:
        """Hides facts, asks for them, and shows the answers."""
        started = time.perf_counter()
        is_drawn = not self.no_plot and _can_draw(self.out)
        prepared = self.prepare()
        directory, model_config, config, dtype, _ = prepared
        nominal = getattr(config, "density", None)
        density = self.density or nominal
        rivals = _make_rivals(self.rivals or (), density)
        with usage_errors():
            for one in rivals.values():
                Settings(model_config=model_config, policy=one, phase=self.phase)
        placement = options.make_placement(self.mesh, model_config, config, *rivals.values())
        num_tokens = options.check_context("--tokens", self.tokens, model_config, usual=TOKENS)
        least = self.facts * TOKENS_PER_FACT + ROOM
        if num_tokens < least:
            raise UsageError(
                f"--tokens must be at least {least} for {self.facts} facts, got {num_tokens}"
            )
        tokenizer = prompt.open_tokenizer(directory)
        with elapsed("hiding facts"):
            text = hide_facts(
                tokenizer, num_tokens=num_tokens - ROOM, num_facts=self.facts, seed=self.seed
            )
        prompt.check_tokens(text.tokens, max_new_tokens=ROOM, model_config=model_config)
        lm = self.load(prepared, tokenizer, sharding=placement, phase=self.phase)
        models = {"dense": lm.with_policy(Dense(block_size=config.block_size)), _OWN: lm}
        for name, one in rivals.items():
            own = lm.with_policy(one)
            models[name] = options.set_density(own, density, num_tokens=num_tokens)

        def show(line: str) -> None:
            if not self.as_json:
                print(line, flush=True)

        length, model = len(text.tokens), checkpoint_name(directory)
        device = jax.devices()[0].device_kind
        show(f"{length:,} tokens of English from {SOURCE}, read by {model} on {device}")
        for fact in text.facts:
            place = f"{fact.position / length:.0%}"
            show(f"  hidden at {place}:{code_statement(fact.word, fact.number)}")
        readings = {}
        for name, own in models.items():
            with elapsed(f"{name} reads and answers"):
                readings[name] = read_and_answer(own, text, max_tokens=num_tokens)
        dense, sparse = readings["dense"], readings[_OWN]
        about = self.preset if nominal is None else f"{self.preset}, density {nominal:g}"
        about += "" if self.phase == "both" else f", {self.phase} only"
        show(f"\n{_table(text, readings, about=about)}\n")
        if not all(reading.results["is_finite"] for reading in readings.values()):
            warnings.warn(NOT_FINITE, stacklevel=1)
        for name in list(readings)[1:]:
            show(_summary(dense, readings[name], who=name))
        if self.phase == "prefill":
            show("Its answers were written densely; --phase both makes them sparse as well.")
        if is_drawn and sparse.selection is None:
            print("no picture: nothing was selected while the text was read", file=sys.stderr)
            is_drawn = False
        if is_drawn:
            title = (
                f"Blocks attended to in {length:,} tokens with {len(text.facts)} facts "
                f"({about}; {sparse.results['measured_density_prefill']:.0%} of all pairs)"
            )
            layers = sparse_layers(model_config, config)
            draw_picture(text, dense, sparse, layers=layers, title=title).savefig(self.out, dpi=110)
            show(f"What was attended to is drawn in {self.out}.")
        total_s = time.perf_counter() - started
        compile_s = sum(reading.compile_s for reading in readings.values())
        show(
            f"{total_s:.0f} s in all, {compile_s:.0f} s of which went into compiling; the times "
            "above leave that out."
        )
        if self.as_json:
            found = {
                "model": model,
                "device": device,
                "dtype": dtype,
                "text": SOURCE,
                "tokens": length,
                "seed": self.seed,
                "preset": self.preset,
                "nominal_density": nominal,
                "phase": self.phase,
                "facts": [fact._asdict() for fact in text.facts],
                "dense": dense.results,
                "sketchwalk": sparse.results,
                "rivals": {name: readings[name].results for name in rivals},
                "compile_s": compile_s,
                "total_s": total_s,
                "picture": str(self.out) if is_drawn else None,
            }
            short = json.loads(json.dumps(found), parse_float=lambda one: round(float(one), 4))
            print(json.dumps(short, allow_nan=False), flush=True)


def _make_rivals(names: Sequence[str], density: float | None) -> dict[str, Policy]:
    """Makes the other policies; `set_density` calibrates those without a density field.

    All of their layers are sparse, so their density is the mean over all layers.
    """
    found = {}
    for name in names:
        if name == options.AUTO:
            raise UsageError("--policy auto is either of the two that are here already")
        if name not in RIVALS:
            raise UsageError(f"--policy must be one of {RIVALS}, got {name!r}")
        policy = by_name(name)
        fields: dict[str, Any] = {"dense_layers": 0} if hasattr(policy, "dense_layers") else {}
        if density is not None and takes_density(policy):
            fields["density"] = density
        found[name] = dataclasses.replace(policy, **fields)
    return found


def _can_draw(out: Path) -> bool:
    """Whether a picture can be drawn; if not, says why on standard error before anything runs."""
    if out.suffix not in _PICTURES:
        raise UsageError(f"--out must end in one of {_PICTURES}, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out must lie in an existing folder, got {str(out)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        print(
            'no picture: it needs matplotlib, pip install "sketchwalk-jax[plots]"', file=sys.stderr
        )
        return False
    return True


class Fact(NamedTuple):
    """A word, its code of five digits, and the number of text tokens up to its end."""

    word: str
    number: str
    position: int

    def is_answer(self, text: str) -> bool:
        """Whether a generated text begins with the code, and no further letter or digit follows."""
        return re.match(rf"\s*{self.number}(?!\w)", text) is not None


class Prompt(NamedTuple):
    """A text, its tokens in int32, and the facts hidden in it, in order."""

    tokens: Int[np.ndarray, "T"]
    facts: tuple[Fact, ...]


def prose() -> list[str]:
    """Selects the paragraphs of Python's help topics that are prose, each in one line.

    Every installation of Python carries them. Grammar rules, tables and examples are left out.
    """
    from pydoc_data.topics import topics

    def is_prose(line: str) -> bool:
        return len(re.findall(r"[A-Za-z ,.’]", line)) >= 0.95 * len(line)

    paragraphs = (part for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    lines = dict.fromkeys(" ".join(paragraph.split()) for paragraph in paragraphs)
    return [line for line in lines if len(line) > 150 and line[-1] == "." and is_prose(line)]


def hide_facts(tokenizer: Any, *, num_tokens: int, num_facts: int, seed: int) -> Prompt:
    """Makes a text of at most `num_tokens` tokens with facts spread over it.

    The passage, words, codes and places are drawn from `seed`; a word occurs nowhere else in the
    text.

    It has at most `MAX_FACTS` facts, and at least `TOKENS_PER_FACT` tokens for each.
    """
    rng = np.random.default_rng(seed)
    paragraphs = prose()
    first = int(rng.integers(len(paragraphs)))
    words = [WORDS[i] for i in rng.permutation(len(WORDS))]
    numbers = [str(number) for number in 10_000 + rng.choice(90_000, num_facts, replace=False)]
    shares = (np.arange(num_facts) + rng.uniform(0.2, 0.8, num_facts)) / num_facts

    statements = [code_statement(*pair) for pair in zip(words, numbers, strict=False)]
    room = num_tokens - len(encode(tokenizer, "".join(statements))) - num_facts
    # Start over if a long context needs more text than the topics have.
    following, text = itertools.islice(itertools.cycle(paragraphs), first, None), ""
    while len(text) < 8 * room:  # more than any tokenizer packs into a token of English
        text += next(following) + " "
    # End at a whole word.
    cut = decode(tokenizer, encode(tokenizer, text, add_special_tokens=False)[:room])
    text = cut.rpartition(" ")[0]
    words = [word for word in words if word not in text.lower()][:num_facts]

    whole, hidden, last = "", list[Fact](), 0
    for word, number, share in zip(words, numbers, shares, strict=True):
        place = text.find(" ", int(share * len(text)))
        whole += text[last:place] + code_statement(word, number)
        position = len(encode(tokenizer, whole.removesuffix(".")))
        hidden.append(Fact(word, number, position))
        last = place
    return Prompt(encode(tokenizer, whole + text[last:]), tuple(hidden))


def timed[Result](call: Callable[[], Result]) -> tuple[Result, float, float]:
    """Returns the result of a call, its seconds without compilation, and compilation seconds."""
    spans: list[tuple[float, float]] = []

    def listen(event: str, start_time: float, end_time: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((start_time, end_time))

    jax.monitoring.register_event_time_span_listener(listen)
    start = time.time()  # the clock that JAX's events use
    try:
        result = jax.block_until_ready(call())
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    whole, compiled, last = time.time() - start, 0.0, start
    # Merge nested spans: tracing a function includes tracing the functions it calls. Another thread
    # may have begun to compile before the call.
    for begin, end in sorted(spans):
        compiled += max(0.0, end - max(begin, last))
        last = max(last, end)
    return result, whole - compiled, compiled


class Reading(NamedTuple):
    """Answers and measurements of one policy.

    Attributes:
      results: Answers and measurements, as `--json` prints them; times leave compilation out.
      selection: Blocks that the text's query blocks attended to, or `None`.
      asked: For each question, the share of each sparse layer's block lists that contain a key
        block for the question's last query block, `[L, J]`; empty without selection.
      compile_s: Seconds spent on compilation.
    """

    results: dict[str, Any]
    selection: BlockSelection | None = None
    asked: Sequence[np.ndarray] = ()
    compile_s: float = 0.0


def read_and_answer(lm: LanguageModel, text: Prompt, *, max_tokens: int) -> Reading:
    """Reads the text once, into a cache of `max_tokens` tokens, and answers every question."""

    def start(tokens: Int[np.ndarray, "_"], width: int, **more: Any) -> Stream:
        # One width for all texts, so that another seed needs no recompilation.
        padded, lengths = pad_right([tokens], width)
        return stream(
            lm.params,
            padded,
            lengths=lengths,
            model_config=lm.model_config,
            policy=lm.policy,
            phase=lm.phase,
            max_new_tokens=ANSWER_TOKENS,
            return_selection=True,
            **more,
        )

    chunks = start(text.tokens, max_tokens - ROOM, max_tokens=max_tokens)
    whole, read_s, compile_s = timed(chunks.__next__)
    is_finite, cache = bool(whole.is_finite[0]), chunks.cache
    answers, asked, num_written = list[dict[str, Any]](), list[np.ndarray](), 0
    written_s = pairs = causal = 0.0
    for fact in text.facts:
        # A call consumes its cache: each question gets a copy.
        question = encode(lm.tokenizer, code_question(fact.word), add_special_tokens=False)
        chunks = start(question, ROOM, cache=_copy(cache))
        read, _, compiling_s = timed(chunks.__next__)
        if read.selection is not None:
            size = read.selection.queries_per_row
            first = len(text.tokens) // size
            last = (len(text.tokens) + len(question) - 1) // size
            asked.append(plots.block_map(read.selection, first_block=first)[:, last - first])
        pieces, seconds, more_s = timed(functools.partial(list[StreamChunk], chunks))
        tokens = np.concatenate([one.tokens[0, : int(one.lengths[0])] for one in pieces])
        answer = _one_line(decode(lm.tokenizer, tokens))
        answers.append({"text": answer, "is_right": fact.is_answer(answer)})
        num_written, written_s = num_written + len(tokens), written_s + seconds
        compile_s += compiling_s + more_s
        is_finite &= bool(pieces[-1].is_finite[0])
        pairs += float(np.mean(pieces[-1].measured_density.decode_pairs))
        causal += float(np.sum(pieces[-1].measured_density.decode_causal))
    results = {
        "read_s": read_s,
        "measured_density_prefill": float(np.mean(whole.measured_density.prefill)),
        "tokens_per_s": num_written / written_s,
        "measured_density_decode": pairs / causal,
        "right": sum(answer["is_right"] for answer in answers),
        "is_finite": is_finite,
        "answers": answers,
    }
    return Reading(results, whole.selection, asked, compile_s)


def _one_line(text: str) -> str:
    """Cuts a text at its first full stop, and replaces terminal control characters."""
    first = re.sub(r"\..*", ".", text, flags=re.DOTALL)
    shown = (char if char.isprintable() or char.isspace() else "�" for char in first)
    return " ".join("".join(shown).split())


@jax.jit
def _copy(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


def _table(text: Prompt, columns: Mapping[str, Reading], *, about: str) -> str:
    """Sets times, densities and answers of all policies side by side."""
    found = [reading.results for reading in columns.values()]
    rows = [
        ["", *columns],
        ["", "", f"({about})"],
        ["reading", *(_time_of(one, found[0]) for one in found)],
        ["  attended pairs", *(f"{one['measured_density_prefill']:.1%}" for one in found)],
    ]
    for index, fact in enumerate(text.facts):
        answers = [one["answers"][index] for one in found]
        rows.append([f"code of {fact.word}?", *map(_verdict, answers)])
    rows += [
        ["  attended pairs", *(f"{one['measured_density_decode']:.1%}" for one in found)],
        ["writing", *(f"{one['tokens_per_s']:.1f} tokens/s" for one in found)],
        ["right", *(f"{one['right']} of {len(text.facts)}" for one in found)],
    ]
    return options.align(rows, left=len(rows[0]), gap=4)


def _time_of(found: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Shows the seconds of reading, and their ratio to dense attention's."""
    ratio = dense["read_s"] / found["read_s"]
    word = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    return f"{found['read_s']:.2f} s" + ("" if found is dense else f"  {word}")


def _verdict(answer: Mapping[str, Any]) -> str:
    """Shows an answer in the width of a column, and whether it is right."""
    text = answer["text"] if len(answer["text"]) <= 16 else answer["text"][:15] + "…"
    return f"{text or '(nothing)'}  {'right' if answer['is_right'] else 'WRONG'}"


def _summary(dense: Reading, sparse: Reading, *, who: str) -> str:
    """Counts the facts that both found, in a sentence."""
    was, now = ([one["is_right"] for one in own.results["answers"]] for own in (dense, sparse))
    if not any(was):
        return "Dense attention found none of the facts with this model."
    kept = sum(both == (True, True) for both in zip(was, now, strict=True))
    return f"{who} found {kept} of the {sum(was)} facts that dense attention found."


def draw_picture(
    text: Prompt, dense: Reading, sparse: Reading, *, layers: Sequence[int], title: str
) -> "Figure":
    """Draws a block map for every sparse layer, and below them each question's attended blocks.

    Orange marks show the blocks with facts. A dark line marks query blocks that attended to
    everything before them. Titles give the answers of `dense` and `sparse`. `layers` are the
    indices of the sparse layers in the model.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    assert sparse.selection is not None
    size = sparse.selection.queries_per_row
    num_blocks = -(-len(text.tokens) // size)
    maps = plots.block_map(sparse.selection)[:, :num_blocks, :num_blocks]
    places = [(fact.position - 1) // size for fact in text.facts]
    heights = [2.4 * math.ceil(len(maps) / 5) + 0.5, 0.5 + 0.7 * len(places)]
    figure = Figure(figsize=(12, sum(heights) + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=12)
    colours = {"attended": plots.BLUE}
    if np.any((maps > 0) & (maps < 1)):  # heads differ, or lists hold pages of blocks
        parts = plots.parts_of(sparse.selection)
        colours = {f"all {parts}": plots.BLUE, f"some {parts}": plots.HALF_BLUE}
    colours["not attended"] = plots.LIGHT_GREY
    handles = [
        *(Patch(color=colour, label=label) for label, colour in colours.items()),
        Line2D([], [], color=plots.DARK, linewidth=4, label="rows that attended to everything"),
        Line2D([], [], color=plots.ORANGE, marker="^", linestyle="", label="where a fact is"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    above, below = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    panels = plots.draw_maps(above, maps, layers, block_size=size)
    for panel, shares in zip(panels, maps, strict=True):
        _mark(panel, shares, places)

    strips = below.subplots(len(places), 1, sharex=True, squeeze=False)[:, 0]
    answers = (one.results["answers"] for one in (dense, sparse))
    asked = zip(strips, text.facts, places, sparse.asked, *answers, strict=True)
    for strip, fact, place, shares, was, now in asked:
        plots.draw_map(strip, shares, 0)
        _mark(strip, shares, [place])
        strip.set_aspect("auto")
        strip.yaxis.set_major_formatter(
            # Ticks between two rows get no label.
            lambda row, _: str(layers[int(row)]) if row in range(len(layers)) else ""
        )
        said = f"dense {_answered(was)}; sparse {_answered(now)}"
        strip.set_title(f"{fact.word}, {fact.number}: {said}", fontsize=9, loc="left")
    below.supxlabel(
        "key blocks that the end of each question attended to, before the answer", fontsize=10
    )
    below.supylabel("layer", fontsize=10)
    return figure


def _mark(axis: Any, shares: np.ndarray, places: Sequence[int]) -> None:
    """Marks facts below a map, and on its left the query blocks that attended to everything."""
    bottom, left = axis.get_ylim()[0], axis.get_xlim()[0]
    axis.plot(places, [bottom] * len(places), "^", color=plots.ORANGE, markersize=5, clip_on=False)
    is_dense = np.nanmin(shares, axis=1) == 1.0
    edges = np.flatnonzero(np.diff(is_dense, prepend=False, append=False))
    for first, end in edges.reshape(-1, 2) - 0.5:
        axis.plot([left, left], [first, end], color=plots.DARK, linewidth=4, clip_on=False)


def _answered(answer: Mapping[str, Any]) -> str:
    text = answer["text"].encode("ascii", errors="replace").decode()  # fonts may lack others
    wrong = f"wrong, {text}" if text else "silent"
    return "right" if answer["is_right"] else wrong
