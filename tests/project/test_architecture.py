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
from sketchwalk_jax.pallas_kernels.decode_attention import decode_attention
from sketchwalk_jax.policies import recommended

MAX_FRAMES = 13


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_data_flows_downward_as_the_page_shows_it(repository):
    script = repository / "benchmarks" / "architecture.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Arrived(Exception):
    """Raised when a watched function is called."""


class Watched:
    """Stands in for a module in another one's namespace; calling some functions ends the call."""

    def __init__(self, module, watched, repository):
        self._module, self._watched, self._root = module, watched, str(repository)

    def __getattr__(self, name):
        return self._arrive if name in self._watched else getattr(self._module, name)

    def _arrive(self, *_, **__):
        frames = [
            frame.name
            for frame in traceback.extract_stack()[:-1]
            if frame.filename.startswith(self._root)
            and not any(part in frame.filename for part in ("/tests/", "/.venv/"))
        ]
        raise Arrived(frames)


# The way to attention ends where a kernel is made; the way to selection, where the policy asks for
# lists of the best pages.
WAYS = {
    "attention-prefill": ("prefill", attention, "ops", ("kernel",)),
    "attention-decode": ("decode", decode_attention, "ops", ("kernel",)),
    "selection-prefill": ("prefill", recommended, "top_k", ("select_blocks",)),
    "selection-decode": ("decode", recommended, "top_k", ("select_token_by_page_scores",)),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("way", WAYS)
def test_a_token_goes_the_way_that_the_page_says(way, page, repository, monkeypatch):
    phase, caller, name, watched = WAYS[way]
    monkeypatch.setattr(caller, name, Watched(getattr(caller, name), watched, repository))
    model = dataclasses.replace(tiny.MODEL, head_dim=64)
    with pytest.raises(Arrived) as reached:
        generate(
            tiny.params(jnp.bfloat16, model),
            tiny.prompts(200)[0],
            model_config=model,
            policy=SketchWalkConfig.recommended(),
            max_new_tokens=2,
            phase=phase,
            implementation="mosaic_gpu",
            kernel_config=KernelConfig(interpret=True),
        )
    (found,) = reached.value.args
    assert len(found) <= MAX_FRAMES, found
    section = page.partition("## From the call to the kernel")[2].partition("##")[0]
    steps = [line.split("|")[2:4] for line in section.splitlines() if re.match(r"\| \d", line)]
    column = 0 if phase == "prefill" else 1
    cells = [both[0] if both[column].strip() == "the same" else both[column] for both in steps]
    named = [name for cell in cells for name in re.findall(r"`(?:\w+\.)?(\w+)`", cell)]
    assert [name for name in named if name in found] == found, (named, found)
