"""Fuzzes all input from outside: breaks good input, and checks what the library does with it.

    python tests/hostile.py                                 # 2,000 cases, as CI runs them
    python tests/hostile.py --minutes 60 --seed 7           # as many as fit
    python tests/hostile.py --kind gguf --first 1234        # one case again

Each kind starts from a corpus of good input and known attacks. A case either works or raises an
error whose message is for the user. Anything else is a finding: another exception, a crash, more
than 30 seconds, or more memory than `MEMORY` beyond the process's start. Cases run in processes of
their own, which restart after a crash. Case `n` of a kind and a seed is the same in every run.
"""

import argparse
import contextlib
import copy
import functools
import json
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 30
MEMORY = 3 * 2**30
"""Bytes that a process may map beyond its start; a case that asks for more fails."""

# Number of cases of each kind in a default run.
KINDS = {
    "config": 500,
    "safetensors": 350,
    "index": 150,
    "gguf": 250,
    "tokenizer": 200,
    "template": 150,
    "prompt": 100,
    "results": 200,
    "plan": 50,
    "saved": 50,
}


# Damage to JSON and bytes.

SCALARS: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63, 10**30, 0.0, -0.5, 0.5, 1e-320,
    1e308, float("nan"), float("inf"), -float("inf"), "", "0", "twelve", "true", "\x00", "é\ud800",
    "../x", "/etc/passwd", "a" * 5000, [], {}, [[]], [0, "x"], {"a": 1}, {"": None}, [None] * 50,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values inside a parsed JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name in value:
            found += places(value[name], (*path, name))
    elif isinstance(value, list):
        for index in range(min(len(value), 40)):
            found += places(value[index], (*path, index))
    return found


def break_json(value: Any, rng: random.Random, changes: int = 2) -> Any:
    """Returns a copy with some values replaced, removed, renamed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, changes)):
        where = places(value)
        if not where:
            break
        *path, last = rng.choice(where)
        node = value
        for name in path:
            node = node[name]
        action = rng.random()
        if action < 0.7:
            node[last] = copy.deepcopy(rng.choice(SCALARS))  # a later change must not alter SCALARS
        elif action < 0.85:
            del node[last]
        elif isinstance(node, dict):
            name = rng.choice(["", "x", "\x00", f"{last}_", "rope_scaling", "layer_types"])
            node[name] = node[last]
        else:
            node.insert(0, node[last])
    return value


def to_bytes(value: Any, rng: random.Random) -> bytes:
    """Encodes JSON, and breaks it in some cases."""
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    return text if rng.random() < 0.85 else break_bytes(text, rng)


def break_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns content that is cut or replaced, has changed bytes, or has bytes inserted."""
    action = rng.random()
    place = rng.randrange(len(content) + 1)
    if action < 0.3:
        return content[:place]
    if action < 0.4:
        return rng.choice([b"", b"\x00", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"null"])
    if action < 0.5:
        return content[:place] + rng.randbytes(rng.randint(1, 40)) + content[place:]
    broken = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        if broken:
            # Change headers, which are at the beginning, more often than the rest.
            end = len(broken) if rng.random() < 0.5 else min(len(broken), 400)
            broken[rng.randrange(end)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(broken)


class Case:
    """Gives a case its folder, shared by its kind, and its random numbers."""

    def __init__(self, folder: Path) -> None:
        """Makes the good input."""
        import checkpoints
        import gguf_checkpoints

        self.folder, self.index = folder, 0
        self.good = folder / "good"
        checkpoints.write_checkpoint(self.good, tokenizer=True)
        self.sharded = folder / "sharded"
        checkpoints.write_checkpoint(self.sharded, num_shards=2)
        self.gguf = [folder / f"{name}.gguf" for name in ("llama", "qwen3_moe")]
        for path in self.gguf:
            gguf_checkpoints.write_gguf(path, path.stem)
        self.work = folder / "work"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Returns the tokenizer of the good checkpoint."""
        from sketchwalk_jax.text.tokenizer import load_tokenizer

        return load_tokenizer(self.good)

    def copy(self, source: Path) -> Path:
        """Makes a fresh folder of links to the files of a good checkpoint."""
        if self.work.exists():
            for path in self.work.iterdir():
                path.unlink()
        self.work.mkdir(exist_ok=True)
        for path in source.iterdir():
            (self.work / path.name).symlink_to(path)
        return self.work

    def replace(self, name: str, content: bytes) -> None:
        """Replaces one file of the copy."""
        (self.work / name).unlink(missing_ok=True)
        (self.work / name).write_bytes(content)


SCALINGS: list[Any] = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
]


def run_config(case: Case, rng: random.Random) -> None:
    """Damages `config.json` and `generation_config.json`."""
    import checkpoints

    from sketchwalk_jax.cli.options import checkpoint_settings
    from sketchwalk_jax.models import ModelConfig
    from sketchwalk_jax.models.rope import rope_frequencies

    raw = checkpoints.tiny_config(rng.choice(["llama", "qwen2", "qwen3", "qwen3_moe"]))
    scaling = rng.choice(SCALINGS)
    name = rng.choice(["rope_scaling", "rope_parameters"])
    raw |= {name: scaling, "layer_types": ["full_attention"] * 2}
    case.copy(case.good)
    case.replace("config.json", to_bytes(break_json(raw, rng), rng))
    if rng.random() < 0.2:
        generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.6, "top_k": 5}
        case.replace("generation_config.json", to_bytes(break_json(generation, rng), rng))
        checkpoint_settings(case.work)
    found = ModelConfig.from_pretrained(case.work)
    assert hash(found) is not None and found.num_layers >= 1 and found.context_length >= 1
    if found.head_dim < 10**4:
        rope_frequencies(found.rope, found.head_dim)


def load_it(path: Path) -> None:
    """Loads a checkpoint; if it loads, its arrays must be right."""
    from sketchwalk_jax.models import load
    from sketchwalk_jax.models.params import check_params

    params, model_config = load(path, progress=False)
    check_params(params, model_config)


SHAPES = [[2**62, 2**62], [2**40], [-1], [], [0], None, ["4"], [1] * 1000, [1.5], [2**64]]
DTYPES = ["F8_E4M3", "I64", "BOOL", "", None, 7, "F64", "BF16"]
NAMES = ["x", "", "../../x", "model.layers.9.x", "__metadata__"]


def break_header(content: bytes, rng: random.Random) -> bytes:
    """Returns a safetensors file with a wrong header."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    one, other = rng.sample([name for name in header if name != "__metadata__"], 2)
    match rng.randrange(10):
        case 0:
            behind = [0, len(data) + 4]
            offsets = [behind, [0, 0], [4, 0], [-1, 4], [2**63, 2**64], [0], None, "x", [0.5, 1.5]]
            header[one]["data_offsets"] = rng.choice(offsets)
        case 1:
            header[one]["data_offsets"] = header[other]["data_offsets"]
        case 2:
            header[one]["shape"] = rng.choice(SHAPES)
        case 3:
            header[one]["dtype"] = rng.choice(DTYPES)
        case 4:
            del header[one]
        case 5:
            header[rng.choice(NAMES)] = header[one]
        case 6:
            header[one]["shape"].reverse()
        case 7:
            header["__metadata__"] = rng.choice(SCALARS)
        case 8:
            header = break_json(header, rng)
        case _:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            count = 100_000 if rng.random() < 0.05 else 1000
            header |= {f"x.{i}": empty for i in range(count)}
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(text) if rng.random() < 0.9 else rng.choice([0, 2**63, len(text) * 2, 2**64 - 1])
    return struct.pack("<Q", length) + text + data


def run_safetensors(case: Case, rng: random.Random) -> None:
    """Damages headers and offsets, and cuts files."""
    case.copy(case.good)
    content = (case.good / "model.safetensors").read_bytes()
    broken = break_header(content, rng) if rng.random() < 0.7 else break_bytes(content, rng)
    case.replace("model.safetensors", broken)
    load_it(case.work)


def run_index(case: Case, rng: random.Random) -> None:
    """Damages the index of several files."""
    case.copy(case.sharded)
    name = "model.safetensors.index.json"
    index = json.loads((case.sharded / name).read_text())
    if rng.random() < 0.3:
        tensor = rng.choice(list(index["weight_map"]))
        elsewhere = ["../good/model.safetensors", "/etc/passwd", "config.json"]
        index["weight_map"][tensor] = rng.choice([*elsewhere, "x.safetensors", ".", "a\\b"])
    else:
        index = break_json(index, rng)
    case.replace(name, to_bytes(index, rng))
    if rng.random() < 0.2:
        shard = rng.choice(sorted(case.sharded.glob("*.safetensors")))
        case.replace(shard.name, break_bytes(shard.read_bytes(), rng))
    load_it(case.work)


def run_gguf(case: Case, rng: random.Random) -> None:
    """Damages headers, metadata and tensors of a GGUF file."""
    from sketchwalk_jax.text.tokenizer import load_tokenizer

    content = rng.choice(case.gguf).read_bytes()
    action = rng.random()
    if action < 0.4:
        content = break_bytes(content, rng)
    else:
        # Change numbers of the metadata: the four or eight bytes after a key.
        keys = list(re.finditer(rb"(llama|qwen3moe|general|tokenizer)\.[a-z_.]+", content))
        place = rng.choice(keys).end() + rng.randrange(0, 12)
        number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**64)])
        content = content[:place] + struct.pack("<Q", number) + content[place + 8 :]
    path = case.folder / "work.gguf"
    path.write_bytes(content)
    if rng.random() < 0.3:
        load_tokenizer(path)("walk")
    else:
        load_it(path)


def run_tokenizer(case: Case, rng: random.Random) -> None:
    """Damages `tokenizer.json` and `tokenizer_config.json`."""
    from sketchwalk_jax.text.tokenizer import decode, encode, load_tokenizer

    case.copy(case.good)
    name = rng.choice(["tokenizer.json", "tokenizer_config.json"])
    good = json.loads((case.good / name).read_text())
    if name == "tokenizer.json" and rng.random() < 0.3:
        good["model"] |= {"merges": [["a", "b"], ["x"], "q q"], "vocab": {"a": 0, "b": 2**31}}
    case.replace(name, to_bytes(break_json(good, rng), rng))
    tokenizer = load_tokenizer(case.work)
    decode(tokenizer, encode(tokenizer, "Walk with the sketch, né, 你."))


ATTACKS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ 'a' * 10000000000 }}",
    "{{ range(10) | map('attr', '__class__') | list }}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{{ messages[9].content }}",
    "{{ 1 / 0 }}",
    "{{ undefined.x.y }}",
    "{{ raise_exception('no') }}",
    "{% for m in messages %}{{ m.content }}",
    "{{",
    "{{ messages | tojson }}{{ messages.append(1) }}",
    "{{ 'x'.format(a=1) }}{{ '{0.__class__}'.format(1) }}",
    "{{ strftime_now('%Y' * 9) }}",
    "{{ messages[0].content | replace('a', messages[0].content) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
]
GOOD_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def run_template(case: Case, rng: random.Random) -> None:
    """Runs chat templates that fail, loop, grow or spy, on messages of any kind."""
    from sketchwalk_jax.text.tokenizer import apply_chat_template

    tokenizer = case.tokenizer
    source = rng.choice([*ATTACKS, GOOD_TEMPLATE, GOOD_TEMPLATE])
    if rng.random() < 0.5:
        source = break_bytes(source.encode(), rng)[:10_000].decode("utf-8", "replace")
    # This attack runs into the time limit of ten seconds: use it rarely.
    if "99999" in source and rng.random() < 0.8:
        source = GOOD_TEMPLATE
    tokenizer.chat_template = source
    prompt = rng.choice(["", "a", "a" * 1000, [], [{"role": "user", "content": "a"}], [{}], [1]])
    text = apply_chat_template(tokenizer, prompt)
    assert b"root:" not in bytes(int(token) % 256 for token in text)


def run_prompt(case: Case, rng: random.Random) -> None:
    """Tries prompts of bytes, of 10 MB and of nothing, and tokens of any kind."""
    import numpy as np

    from sketchwalk_jax.cli import prompt
    from sketchwalk_jax.models import ModelConfig

    path = case.folder / "prompt.txt"
    drawn = "".join(chr(rng.randrange(0xD7FF)) for _ in range(200)).encode()
    long, marks = b" " * 100_000, "né, 你, 👩‍👩‍👧, \u202e\ufeff".encode()
    fixed = [b"", b"\x00", b"walk\r\n", marks, long, b"<|eos|>" * 10_000]
    content = rng.choice([*fixed, rng.randbytes(100), drawn])
    if rng.random() < 0.02:
        content = b"walk " * 2_000_000
    path.write_bytes(content)
    text, tokenizer = prompt.read_source(None, path), case.tokenizer
    model_config = ModelConfig.from_pretrained(case.good)
    prompt.check_size(text, tokenizer, model_config=model_config)
    tokens = prompt.tokenize(tokenizer, text, is_chat=rng.random() < 0.3, system=None)
    assert len(tokens) and np.asarray(tokens).min() >= 0
    prompt.check_tokens(tokens, max_new_tokens=4, model_config=model_config)


def run_results(case: Case, rng: random.Random) -> None:
    """Damages `quality.json`, then reads and continues it."""
    import quality_rows

    from sketchwalk_jax.evaluation.results import ResultsFile, read_results

    if not hasattr(case, "results"):
        made = quality_rows.make_results()
        meta, rows = made["meta"], made["rows"][:6]
        one = {name: rows[0][name] for name in ("policy", "preset", "density")} | {"variant": None}
        rule, place = one | {"phases": ["both"]}, {"task": "multi_key", "tokens": 512}
        meta["asked"] = [{"tokens": [512], "tasks": ["multi_key"], "rules": [rule]}]
        meta |= {"drawn": [place | {"answered": "01"}], "not_run": [rule | place]}
        case.results = {"meta": meta | {"sources": "aaaa"}, "rows": rows}
    path = case.folder / "quality.json"
    content = to_bytes(break_json(case.results, rng, changes=3), rng)
    path.write_bytes(content)
    try:
        if rng.random() < 0.5:
            read_results(path)
        else:
            ResultsFile(path, case.results["meta"]).add(case.results["rows"][:1])
            json.loads(path.read_text())
            content = path.read_bytes()
    finally:
        assert path.read_bytes() == content, "a file that was refused was changed"
        assert not list(case.folder.glob(".quality.json*"))


def run_plan(case: Case, rng: random.Random) -> None:
    """Damages a checkpoint's plan."""
    import tiny

    from sketchwalk_jax.plan import Plan

    path = case.folder / "plan.json"
    tiny.plan((0.1, 0.5), (0.5, 0.1), (0.02, 0.01)).write(path, measured={})
    path.write_bytes(to_bytes(break_json(json.loads(path.read_text()), rng), rng))
    plan = Plan.read(path)
    assert len(plan.share_density(0.3)) == plan.num_layers


def run_saved(case: Case, rng: random.Random) -> None:
    """Damages `model_config.json` of a directory that `save` wrote."""
    import dataclasses

    import tiny

    from sketchwalk_jax.models import ModelConfig

    folder = case.folder / "saved"
    folder.mkdir(exist_ok=True)
    fields = dataclasses.asdict(tiny.MODEL)
    del fields["plan"]
    saved = {"format_version": 1, "model_config": fields, "dtypes": {}}
    (folder / "model_config.json").write_bytes(to_bytes(break_json(saved, rng), rng))
    ModelConfig.from_pretrained(folder)


RUN: dict[str, Callable[[Case, random.Random], None]] = {
    name: globals()[f"run_{name}"] for name in KINDS
}
FOR_USERS = (ValueError, NotImplementedError, OSError)
"""Errors that a case may raise: their messages are for the user."""


def work(kind: str, seed: int, first: int, count: int, until: float, report: Path) -> None:
    """Runs cases in this process; writes a line of JSON when one begins and when one ends."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax  # noqa: F401  (its memory is not the cases')

    with tempfile.TemporaryDirectory() as folder, report.open("a", encoding="utf-8") as file:
        case = Case(Path(folder))
        with contextlib.suppress(*FOR_USERS):
            RUN[kind](case, random.Random(0))  # imports before memory is limited
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        for case.index in range(first, first + count):
            if time.time() > until:
                break
            print(json.dumps({"case": case.index}), file=file, flush=True)
            found: dict[str, Any] = {}
            signal.alarm(SECONDS)
            started = time.monotonic()
            try:
                RUN[kind](case, random.Random(f"{kind} {seed} {case.index}"))
            except FOR_USERS:
                pass
            except BaseException as error:  # noqa: B036  (panics of Rust are no `Exception`)
                trace = "".join(traceback.format_exception(error))[-3000:]
                found = {"error": repr(error)[:300], "trace": trace}
            signal.alarm(0)
            found["seconds"] = round(time.monotonic() - started, 2)
            found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps(found), file=file, flush=True)


def fuzz(
    kind: str, *, seed: int, first: int, count: int, minutes: float | None = None
) -> dict[str, Any]:
    """Runs cases of one kind in a subprocess; returns counts and findings."""
    until = time.time() + (minutes * 60 if minutes else 10**9)
    ended, last = list[dict[str, Any]](), first + count
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        while first < last and time.time() < until:
            report.write_text("")
            words = [kind, seed, first, last - first, until, report]
            process = subprocess.run(
                [sys.executable, __file__, "--work", *map(str, words)],
                capture_output=True,
                text=True,
            )
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            ended += [a | b for a, b in zip(lines[::2], lines[1::2], strict=False)]
            if process.returncode == 0:
                break
            if len(lines) % 2 == 0:
                raise RuntimeError(f"{kind} did not start: {process.stderr[-3000:]}")
            what = "hang" if process.returncode == -signal.SIGALRM else "crash"
            ended.append(lines[-1] | {"error": what, "trace": process.stderr[-2000:]})
            first = lines[-1]["case"] + 1
    return {
        "kind": kind,
        "cases": len(ended),
        "findings": [{"kind": kind, "seed": seed} | one for one in ended if "error" in one],
        "slowest_s": max((one.get("seconds", 0.0) for one in ended), default=0.0),
        "peak_mib": max((one.get("peak", 0) for one in ended), default=0) >> 20,
    }


def main() -> int:
    """Runs all kinds, or one; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="as many cases as fit into this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(KINDS))
    parser.add_argument("--first", type=int, help="only this case of --kind")
    given = parser.parse_args()
    kinds = [given.kind] if given.kind else list(KINDS)
    total, is_bad = sum(KINDS[kind] for kind in kinds), False
    for kind in kinds:
        minutes = given.minutes and given.minutes * KINDS[kind] / total
        count = 10**9 if minutes else KINDS[kind] if given.first is None else 1
        found = fuzz(kind, seed=given.seed, first=given.first or 0, count=count, minutes=minutes)
        print(
            f"{kind:12} {found['cases']:7} cases, {len(found['findings'])} findings, slowest "
            f"{found['slowest_s']} s, peak {found['peak_mib']} MiB",
            flush=True,
        )
        for one in found["findings"][:5]:
            is_bad = True
            print(f"  case {one['case']}: {one['error']}\n{one['trace']}")
    return int(is_bad)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["--work"]:
        name, *numbers, path = sys.argv[2:]
        work(name, int(numbers[0]), int(numbers[1]), int(numbers[2]), float(numbers[3]), Path(path))
    else:
        sys.exit(main())
