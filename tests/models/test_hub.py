"""Models by their name on the hub: downloaded files, the cache, and messages after failures."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from hub_server import COMMIT, Hub

from sketchwalk_jax.models.hub import checkpoint_name, is_hub_name

NAME = "someone/tiny-model"
SHARDS = tuple(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))

# Answers a line of JSON for each name on standard input. Chunks are small, as the hub's client
# writes whole chunks to disk: its 10 MB are larger than the files.
DRIVER = """
import json, sys
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1 << 14
from sketchwalk_jax.models.hub import find_checkpoint
for line in sys.stdin:
    try:
        found = {"folder": str(find_checkpoint(line.strip()))}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(found), flush=True)
"""


class Driver:
    """A process that loads checkpoints by name."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> None:
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()

    def find(self, name: str) -> dict[str, Any]:
        self.ask(name)
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def write_repository(folder: Path) -> None:
    """Writes a checkpoint in two files, with many others that must not be downloaded."""
    checkpoints.write_checkpoint(folder, "qwen3", tokenizer=True, num_shards=2, vocab_size=8192)
    (folder / "modeling_x.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    (folder / "model.fp16.safetensors").write_bytes(b"another variant")
    (folder / "README.md").write_text("# A model")
    (folder / "original").mkdir()
    (folder / "original" / "config.json").write_text("{}")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.repositories[NAME] = tmp_path / "repository"
        write_repository(hub.repositories[NAME])
        yield hub


def test_a_model_is_fetched_by_its_name_and_found_again_offline(
    hub: Hub, tmp_path: Path, program_environment
):
    for name, raw in (("gguf", None), ("pickled", {}), ("mixture", {"model_type": "mixtral"})):
        folder = hub.repositories[f"someone/{name}"] = tmp_path / name
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
        if raw is not None:
            config = checkpoints.tiny_config() | raw
            (folder / "config.json").write_text(json.dumps(config))
    adapter = hub.repositories["someone/adapter"] = tmp_path / "adapter"
    checkpoints.write_adapter(adapter)
    both = hub.repositories["someone/both"] = tmp_path / "both"
    checkpoints.write_adapter(both)
    checkpoints.write_checkpoint(both)
    hub.repositories["someone/gated"] = hub.repositories[NAME]
    hub.gated.add("someone/gated")
    here = tmp_path / "here"
    checkpoints.write_checkpoint(here / "someone" / "local")
    environment = program_environment | hub.environment(tmp_path / "home")
    driver = Driver(environment, here)

    found = driver.find(NAME)
    folder = Path(found["folder"])
    assert folder.name == COMMIT and checkpoint_name(folder) == "tiny-model"
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    wanted |= {"model.safetensors.index.json"}
    wanted |= set(SHARDS)
    assert {file.name for file in folder.rglob("*")} == wanted
    assert {name for name, _ in hub.asked} == wanted

    count = len(hub.asked)
    assert driver.find("someone/local") == {"folder": "someone/local"}
    assert driver.find(NAME) == found and len(hub.asked) == count
    assert "model.safetensors" in os.listdir(driver.find("someone/both")["folder"])
    pickles = "must hold model.safetensors, got no such files: pickled weights are never"
    merge = "got 'someone/adapter', an adapter of peft for someone/tiny-model; merge"
    for name, error, message in (
        ("nothing", "FileNotFound", "no such folder here and no such model at http://127.0.0.1"),
        ("gated", "Permission", "someone/gated is gated: ask for access at http"),
        ("gguf", "Value", "hf download someone/gguf FILE.gguf"),
        ("adapter", "Value", merge),
        ("pickled", "Value", pickles),
        ("mixture", "Value", "mixtral"),
    ):
        refused = driver.find(f"someone/{name}")
        assert refused["error"] == f"{error}Error" and message in refused["message"], refused
    assert not [
        name for name, _ in hub.asked if name.endswith((".gguf", ".bin")) or "adapter_model" in name
    ]

    hub.__exit__()
    assert driver.find(NAME) == found
    gone = driver.find("someone/other")
    assert gone["error"] == "ConnectionError"
    assert "cannot be reached" in gone["message"] and "http://127.0.0.1" in gone["message"]
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["config.json", "tokenizer.json", SHARDS[1]])
def test_killed_downloads_do_not_load_and_go_on_with_the_missing_files(
    stopped, hub: Hub, tmp_path: Path, program_environment
):
    home = tmp_path / "home"
    environment = program_environment | hub.environment(home)
    hub.dropped, hub.stopped = {SHARDS[0]}, {stopped}
    first = Driver(environment, tmp_path)
    first.ask(NAME)
    deadline = time.monotonic() + 300
    before = SHARDS[0] if stopped == SHARDS[1] else "model.safetensors.index.json"
    while time.monotonic() < deadline and not (
        list(home.rglob(before)) and stopped in dict(hub.asked)
    ):
        time.sleep(0.05)
    first.close()
    done = {path.name for path in home.rglob("snapshots/*/*")}
    assert before in done and stopped not in done
    hub.stopped, asked = set(), len(hub.asked)
    offline = Driver(environment | {"HF_HUB_OFFLINE": "1"}, tmp_path)
    assert offline.find(NAME)["error"] == "ConnectionError"
    offline.close()
    second = Driver(environment, tmp_path)
    folder = Path(second.find(NAME)["folder"])
    second.close()
    assert not done & {name for name, _ in hub.asked[asked:]}
    for name in (*SHARDS, "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (hub.repositories[NAME] / name).read_bytes()
    # A broken connection goes on inside the file.
    whole, *_, rest = (span for name, span in hub.asked if name == SHARDS[0])
    assert whole is None and rest is not None and rest.startswith("bytes=") and rest != "bytes=0-"


def test_names_of_the_hub_are_told_from_paths():
    names = ["Qwen/Qwen3-0.6B", "./a/b", "/a/b", "a/b/c", "a", "~/a", "a/b.gguf", "a/.b", "a b/c"]
    assert [name for name in names if is_hub_name(name)] == names[:1]
