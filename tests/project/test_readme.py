"""README's block on text runs unchanged on a small model under the name that it loads."""

import subprocess
import sys
from pathlib import Path

import checkpoints
import guides
import pytest
from hub_server import Hub

MODEL = "Qwen/Qwen3-0.6B"


@pytest.mark.slow
def test_text_goes_in_and_comes_out(repository: Path, tmp_path: Path, program_environment):
    code = guides.block(repository / "README.md", "text")
    assert MODEL in code
    with Hub() as hub:
        hub.repositories[MODEL] = tmp_path / "model"
        checkpoints.write_checkpoint(tmp_path / "model", "qwen3", tokenizer=True)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=program_environment | hub.environment(tmp_path / "home"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr
