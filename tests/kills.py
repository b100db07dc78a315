"""Kills long reads and writes at random moments, continues them, and checks their files.

    python tests/kills.py                                   # 20 kills of each kind
    python tests/kills.py --kind evaluation --kills 5 --seed 3

A *writer* writes versions of one thing until it is killed. A *run* is a command that ends; it is
killed at a random moment of its duration and started again. After every kill, finished work must be
there and whole, and unfinished work must not look finished. A run that ends must give the result of
an uninterrupted run. Kills are SIGKILL: the process cannot clean up.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Each continues after the last kill, and prints a number when a version is finished.
_VERSIONS = """
from tiny import MODEL, params
from sketchwalk_jax.models import load, save
try:
    first = int(load(target)[0]["final_norm"]["scale"][0])
except FileNotFoundError:
    first = 0
tree = params()
for count in range(first + 1, first + 1000):
    tree["final_norm"]["scale"] = jnp.full((MODEL.hidden_size,), float(count))
    {write}
    print(count, flush=True)
"""
WRITERS = {
    "orbax": _VERSIONS.format(write="save(target, tree, MODEL, overwrite=True)"),
    "safetensors": """
sys.path.insert(0, root + "/training")
from tokenizers import Tokenizer, models
from export import export
tokenizer = Tokenizer(models.BPE())
about = {"metrics": {}, "card": "a model"}
"""
    + _VERSIONS.format(write="export(Path(target), tree, tokenizer, model_config=MODEL, **about)"),
    "results": """
import quality_rows
from sketchwalk_jax.evaluation.results import ResultsFile
made = quality_rows.make_results()
file = ResultsFile(target, made["meta"])
for count in range(len(file.rows), len(made["rows"])):
    file.add([made["rows"][count]])
    print(count + 1, flush=True)
""",
}
_BEFORE_A_WRITER = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
import jax.numpy as jnp
root, target = {str(ROOT)!r}, sys.argv[1]
"""


def version_of(kind: str, target: Path) -> int:
    """Returns the version that a writer left, read through the public functions."""
    if kind == "results":
        from sketchwalk_jax.evaluation.results import read_results

        return len(read_results(target).rows)
    from sketchwalk_jax.models import load

    scale = load(target, progress=False)[0]["final_norm"]["scale"]
    assert (scale == scale[0]).all()
    return int(scale[0])


def kill_writer(kind: str, *, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills a writer `kills` times; returns counts."""
    target, rng, finished = folder / "target", random.Random(f"{kind} {seed}"), 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", _BEFORE_A_WRITER + WRITERS[kind], str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()  # it has begun to write
        assert first, process.stderr.read()[-3000:]
        assert int(first) > finished, "finished work was lost"
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        rest = process.communicate()[0].split("\n")
        finished = int([first, *(line for line in rest[:-1] if line)][-1])
        left = version_of(kind, target)
        assert left in (finished, finished + 1), f"{left} was left of {finished}"
        finished = left
    # Unfinished writes may leave only hidden files next to the target.
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {"target"}
    return {"kind": kind, "kills": kills, "seed": seed, "versions": finished}


@dataclasses.dataclass(frozen=True)
class Run:
    """A command that ends.

    Attributes:
      command: Gives the command line for an output folder.
      finished: Gives the finished work in a folder.
      result: Gives the result of the whole run.
    """

    command: Callable[[Path], list[str]]
    finished: Callable[[Path], frozenset[Any]]
    result: Callable[[Path], Any]


def sketchwalk(words: str, **options: Path) -> list[str]:
    """Returns a command line of `sketchwalk` with more options that are paths."""
    more = [text for name, path in options.items() for text in (f"--{name}", str(path))]
    return [sys.executable, "-m", "sketchwalk_jax", *words.split(), *more]


def evaluation(folder: Path) -> Run:
    """Returns a run of `sketchwalk eval` of a tiny model."""
    import checkpoints

    from sketchwalk_jax.evaluation.results import read_results

    model = folder / "model"
    checkpoints.write_checkpoint(model, tokenizer=True)

    def rows(out: Path) -> frozenset[str]:
        """Reads the rows; an incomplete file says so."""
        path = out / "quality.json"
        if not path.exists():
            return frozenset()
        results = read_results(path)
        assert results.asked > 0
        found = frozenset(json.dumps(row, sort_keys=True) for row in results.rows)
        assert len(found) == len(results.rows)
        return found

    def result(out: Path) -> frozenset[str]:
        assert read_results(out / "quality.json").missing == ()
        assert [path.name for path in out.iterdir()] == ["quality.json"]
        return rows(out)

    words = (
        "eval --policy streaming --density 0.2 --set dense_layers=1 --tokens 512 "
        "--task single_needle --task text_loss --prompts 2 --probe-prompts 1"
    )
    return Run(lambda out: sketchwalk(words, model=model, out=out / "quality.json"), rows, result)


def prompts(folder: Path) -> Run:
    """Returns a run of `sketchwalk generate --prompts`: many short texts of a tiny model."""
    import checkpoints

    model, lines = folder / "model", folder / "prompts.jsonl"
    tensors = checkpoints.write_checkpoint(model, tokenizer=True)
    checkpoints.write_letters_only(model, tensors)
    texts = [f"{'walk ' * (n % 7)}{n}" for n in range(200)]
    lines.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")

    def finished(out: Path) -> frozenset[bytes]:
        """Returns the whole lines, each of which must be a text."""
        path = out / "texts.jsonl"
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [json.loads(line) for line in whole]
        assert len({one["index"] for one in found}) == len(found)
        assert all(one["input"] == texts[one["index"]] for one in found)
        return frozenset(whole)

    def result(out: Path) -> tuple[set[str], bytes]:
        assert len(finished(out)) == len(texts)
        content = (out / "texts.jsonl").read_bytes()
        indices = [json.loads(line)["index"] for line in content.splitlines()]
        assert indices == list(range(len(texts)))
        return {path.name for path in out.iterdir()}, content

    words = "generate --max-new-tokens 6 --temperature 1 --batch 4 --policy dense"
    return Run(
        lambda out: sketchwalk(words, model=model, prompts=lines, out=out / "texts.jsonl"),
        finished,
        result,
    )


RUNS: dict[str, Callable[[Path], Run]] = {
    "evaluation": evaluation,
    "prompts": prompts,
}
KINDS = (*WRITERS, *RUNS)


def kill_run(kind: str, run: Run, *, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills a run `kills` times, at random moments; returns counts."""
    rng, log = random.Random(f"{kind} {seed}"), folder / "log"

    def start(out: Path) -> subprocess.Popen:
        out.mkdir(exist_ok=True)
        with log.open("w") as file:
            return subprocess.Popen(
                run.command(out), stdout=file, stderr=file, start_new_session=True
            )

    def end(process: subprocess.Popen) -> None:
        assert process.wait() == 0, log.read_text()[-3000:]

    whole = folder / "whole"
    end(start(whole))  # fills the compilation cache
    expected = run.result(whole)
    shutil.rmtree(whole)
    started = time.monotonic()
    process, begun = start(whole), None
    while process.poll() is None:
        if begun is None and run.finished(whole):
            begun = time.monotonic() - started
        time.sleep(0.05)
    end(process)
    seconds = time.monotonic() - started
    begun = seconds if begun is None else begun
    assert run.result(whole) == expected, "two uninterrupted runs differ"
    count, rounds, amid = 0, 0, 0
    while count < kills:
        out, finished, rounds = folder / f"round {rounds}", None, rounds + 1
        while count < kills:
            is_fresh, started, process = not out.exists(), time.monotonic(), start(out)
            # Every second kill comes after an uninterrupted run would have finished something.
            moment = rng.uniform(0.0 if count % 2 else begun, seconds)
            try:
                assert process.wait(moment) == 0, log.read_text()[-3000:]
                if is_fresh:  # the machine has become faster
                    took = time.monotonic() - started
                    begun, seconds = begun * took / seconds, took
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                _wait_for_group(process.pid)
            count, now = count + 1, run.finished(out)
            assert finished is None or finished <= now, "finished work was lost"
            finished, amid = now, amid + bool(now)
        end(start(out))
        assert run.result(out) == expected, "a run that was killed ends in another result"
    counts = {"kills": count, "after something was finished": amid, "runs that ended": rounds}
    return {"kind": kind, "seed": seed, **counts, "seconds of a run": round(seconds, 1)}


def _wait_for_group(number: int) -> None:
    """Waits until no child of a killed process is left."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a killed run left processes of its own behind")


def kill(kind: str, *, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills one of `KINDS` in an empty folder; returns counts.

    Raises:
      AssertionError: If finished work is lost or damaged, or a result differs.
    """
    if kind in WRITERS:
        return kill_writer(kind, kills=kills, seed=seed, folder=folder)
    return kill_run(kind, RUNS[kind](folder), kills=kills, seed=seed, folder=folder)


def main() -> None:
    """Kills all kinds, or one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        for kind in [given.kind] if given.kind else KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found = kill(kind, kills=given.kills, seed=given.seed, folder=Path(folder))
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
