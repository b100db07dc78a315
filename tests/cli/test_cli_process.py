"""The command line as a process: pipes, interrupts, progress, caching of programs."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import checkpoints
import jax
import numpy as np
import pytest

import sketchwalk_jax
from sketchwalk_jax import progress
from sketchwalk_jax.inference import compiled

PROMPT = "Walk with the sketch.\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True)
    return directory


@pytest.mark.slow
def test_module_reads_a_pipe_and_keeps_compiled_programs(tmp_path, model, program_environment):
    environment = program_environment | {"XDG_CACHE_HOME": str(tmp_path)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "sketchwalk_jax", "generate", "--model", model, "--json"]
    command += ["--max-new-tokens", "8"]
    done = subprocess.run(command, input=PROMPT.encode(), env=environment, capture_output=True)
    # A slow machine adds lines of progress.
    told = re.sub(rb"(?m)^[\w ]+: \d\d:\d\d\n", b"", done.stderr).decode().splitlines()
    assert [line.split(": ")[:2] for line in told] == [
        ["auto", "prefill dense"],
        ["auto", "decode dense"],
    ]
    assert json.loads(done.stdout)["prompt_tokens"] == len(PROMPT)
    assert len(list(tmp_path.glob("sketchwalk-jax/compiled/programs/*"))) >= 2


@pytest.fixture
def fresh_settings(tmp_path: Path, monkeypatch):
    """Sets JAX's cache options as in a new process; restores the tests' options afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compiled.keep_by_default.cache_clear()
    yield tmp_path
    compiled.keep_by_default.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["generate", "stream", "prefill", "decode_step", "forward"])
def test_calls_keep_compiled_programs_unless_told_otherwise(name, fresh_settings):
    def call():
        more = {"max_new_tokens": 1} if name in ("generate", "stream") else {"cache": None}
        options = {"model_config": None} | ({} if name == "forward" else more)
        with pytest.raises(ValueError, match="model_config must be"):
            getattr(sketchwalk_jax, name)({}, np.zeros((1, 4), np.int32), **options)

    jax.config.update("jax_enable_compilation_cache", False)
    call()
    assert jax.config.jax_compilation_cache_dir is None and not list(fresh_settings.iterdir())
    jax.config.update("jax_enable_compilation_cache", True)
    compiled.keep_by_default.cache_clear()  # pretend to be another process
    call()
    folder = fresh_settings / "sketchwalk-jax" / "compiled"
    assert jax.config.jax_compilation_cache_dir == str(folder) and folder.is_dir()
    jax.config.update("jax_compilation_cache_dir", None)
    call()
    assert jax.config.jax_compilation_cache_dir is None  # a later change by the user wins


def test_jax_settings_for_compiled_programs_are_respected(fresh_settings, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    compiled.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None and not list(fresh_settings.iterdir())


def test_folder_that_cannot_be_made_keeps_no_programs(fresh_settings, monkeypatch):
    (fresh_settings / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_settings / "file"))
    compiled.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_closed_pipe_ends_quietly(model: Path, program_environment):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sketchwalk_jax", "info", "--model", model]
    done = subprocess.run(command, env=program_environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_interrupt_ends_at_once_and_quietly(model: Path, program_environment):
    # The signal arrives during the read; a Python handler would miss it.
    code = f"""
import io, os, signal, sys
from sketchwalk_jax.cli import main

class Interrupting(io.BytesIO):
    def read(self):
        os.kill(os.getpid(), signal.SIGINT)

sys.stdin = io.TextIOWrapper(Interrupting())
sys.argv[1:] = ["generate", "--model", {str(model)!r}]
main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=program_environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


class _Terminal(io.StringIO):
    """Standard error that is a terminal, and signals when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_elapsed_time_is_shown_on_a_terminal_and_cleared_and_short_work_shows_nothing(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 3600.0)
    with progress.elapsed("reading"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    terminal.written.clear()
    with progress.elapsed("reading"):
        assert terminal.written.wait(60)
    assert "reading: 00:0" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[2].strip() == ""


def test_a_log_gets_a_line_now_and_then_and_nothing_for_short_work(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)

    def work(num_lines: int) -> list[str]:
        with progress.elapsed("reading"), progress.progress_bar(2, "writing", unit=" files") as bar:
            bar.update(1)
            while log.getvalue().count("\n") < num_lines:
                time.sleep(0.01)
        return log.getvalue().splitlines()

    assert work(0) == []
    monkeypatch.setattr(progress, "LINE_EVERY", 0.05)
    lines = work(4)
    assert "reading: 00:00" in lines
    assert any(re.fullmatch(r"writing: 1 of 2 files in 00:0\d, .* left", line) for line in lines)
