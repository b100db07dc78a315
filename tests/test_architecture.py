"""The architecture page matches the code: folders, and the path of a token through them."""

import dataclasses
import re
import subprocess
import sys
import traceback

import jax.numpy as jnp
import pytest
import tiny

from sketchwalk_jax import KernelConfig, SketchWalkConfig, generate
from sketchwalk_jax.pallas_kernels.attention import hopper as attention
from sketchwalk_jax.pallas_kernels.decode_attention import hopper as decode_attention

MAX_FRAMES = 10  # from `generate` to the kernel


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_data_flows_downward_as_the_page_shows_it(repository):
    script = repository / "benchmarks" / "architecture.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Arrived(Exception):
    """Raised when the kernel is reached."""


class Watched:
    """Stands in for the module that makes kernels in one file; making a kernel ends the call."""

    def __init__(self, module, repository):
        self._module, self._root = module, str(repository)

    def __getattr__(self, name):
        return getattr(self._module, name)

    def kernel(self, *_, **__):
        frames = [
            frame.name
            for frame in traceback.extract_stack()[:-1]
            if frame.filename.startswith(self._root)
            and not any(part in frame.filename for part in ("/tests/", "/.venv/"))
        ]
        raise Arrived(frames)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("phase", "module", "column"),
    [("prefill", attention, 0), ("decode", decode_attention, 1)],
)
def test_a_token_goes_the_way_that_the_page_says(
    phase, module, column, page, repository, monkeypatch
):
    monkeypatch.setattr(module, "ops", Watched(module.ops, repository))
    model = dataclasses.replace(tiny.MODEL, head_dim=64)
    with pytest.raises(Arrived) as reached:
        generate(
            tiny.params(jnp.bfloat16, model),
            tiny.prompts(200)[0],
            model_config=model,
            policy=SketchWalkConfig.paper(),
            max_new_tokens=2,
            phase=phase,
            implementation="mosaic_gpu",
            kernel_config=KernelConfig(interpret=True),
        )
    (found,) = reached.value.args
    assert len(found) <= MAX_FRAMES, found
    section = page.partition("## From the call to the kernel")[2].partition("##")[0]
    steps = [line.split("|")[2:4] for line in section.splitlines() if re.match(r"\| \d", line)]
    cells = [both[0] if both[column].strip() == "the same" else both[column] for both in steps]
    named = [name for cell in cells for name in re.findall(r"`(?:\w+\.)?(\w+)`", cell)]
    assert [name for name in named if name in found] == found, (named, found)
