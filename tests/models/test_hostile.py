"""Input from outside may be anything: `hostile.py` in short, attacks by name, and kills."""

import json
import os
import pickle
import sys
import time

import checkpoints
import hostile
import jax
import kills
import numpy as np
import pytest
from variants import slow_unless

from sketchwalk_jax.models import load
from sketchwalk_jax.text import chat_templates
from sketchwalk_jax.text.tokenizer import apply_chat_template, load_tokenizer

pytestmark = pytest.mark.unchecked
KEPT = ("config", "safetensors", "gguf")


@pytest.fixture(autouse=True)
def _programs_import_the_package(monkeypatch, program_environment):
    monkeypatch.setenv("PYTHONPATH", program_environment["PYTHONPATH"])


@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", slow_unless(KEPT.__contains__, hostile.KINDS))
def test_broken_input_is_read_or_refused(kind, share):
    """Tries 2,000 cases of all kinds: no other error, no crash, no hang, no half-written file."""
    count = int(share * hostile.KINDS[kind])
    found = hostile.fuzz(kind, seed=0, first=0, count=count)
    assert found["cases"] == count
    assert not found["findings"], json.dumps(found["findings"], indent=1)
    assert found["slowest_s"] < hostile.SECONDS
    assert found["peak_mib"] < hostile.MEMORY >> 20


@pytest.mark.slow
def test_the_fuzzer_finds_what_it_looks_for(monkeypatch, tmp_path):
    """Adds a kind for each finding: another error, a crash, a hang, and too much memory."""
    source = (hostile.Path(hostile.__file__)).read_text(encoding="utf-8")
    broken = """
def run_plan(case, rng):
    what = ["fine", "error", "crash", "hang", "memory", "fine"][case.index]
    if what == "error":
        raise KeyError("x")
    if what == "crash":
        os.abort()
    if what == "hang":
        time.sleep(99)
    if what == "memory":
        bytearray(2 * MEMORY)


RUN: dict["""
    source = source.replace("\nRUN: dict[", broken, 1).replace("SECONDS = 30", "SECONDS = 1")
    path = tmp_path / "hostile.py"
    path.write_text(source, encoding="utf-8")
    tests = os.path.dirname(hostile.__file__)
    monkeypatch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(hostile, "__file__", str(path))
    found = hostile.fuzz("plan", seed=0, first=0, count=6)
    kinds = [one["error"].partition("(")[0] for one in found["findings"]]
    assert kinds == ["KeyError", "crash", "hang", "MemoryError"]
    assert [one["case"] for one in found["findings"]] == [1, 2, 3, 4] and found["cases"] == 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_byte_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.mark.parametrize("source", hostile.ATTACKS)
def test_templates_that_attack_are_stopped(source, tokenizer, monkeypatch):
    """Templates stop soon, and read nothing that they should not."""
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0)
    monkeypatch.setattr(chat_templates, "GROWTH", 2**27)
    tokenizer.chat_template = source
    start, previous = time.monotonic(), sys.gettrace()
    try:
        text = bytes(apply_chat_template(tokenizer, "a" * 200).astype(np.uint8).tolist())
        assert b"root:" not in text and b"class" not in text and len(text) < 10**6
    except ValueError as error:
        assert "chat" in str(error)
    assert time.monotonic() - start < 30 and sys.gettrace() is previous


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (hostile.ATTACKS[1], "end within 1 seconds, got one that goes on"),
        (hostile.ATTACKS[12], "take less than 134217728 bytes of memory"),
        ("{{ 'a' * 10000000000 }}", "no numbers of more than six digits, got '10000000000'"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
        ("{{ raise_exception('no users') }}", "refuses the messages: no users"),
    ],
)
def test_what_stops_a_template_is_said(source, message, tokenizer, monkeypatch):
    # Where time is not the limit under test, allow enough for a busy machine.
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0 if "seconds" in message else 600.0)
    monkeypatch.setattr(chat_templates, "GROWTH", 2**27)
    tokenizer.chat_template = source
    with pytest.raises(ValueError, match=message):
        apply_chat_template(tokenizer, "a")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'Answer **briefly**.' }}",
        "{{ 'as of 20250131' }}",
        "{{ '****' }}{{ \"100% 20250131\" }}{{ 'a%2020250131a' }}{{ '20250131' }}",
        "{% macro f() %}{{ kwargs.a }}{% endmacro %}{{ f(**{'a': '{\"date\": 20250131}'}) }}",
        "{# 2 ** 20250131 #}{% if 999_999 > 1.23456789 %}2 ** 20250131{% endif %}",
    ],
)
def test_text_in_a_template_is_no_operation(source, tokenizer):
    tokenizer.chat_template = source
    assert len(apply_chat_template(tokenizer, "a")) > 3


@pytest.mark.parametrize(
    "source",
    [
        "{{ 2 ** 9 }}", "{{ (2)\n** 9 }}", "{{ a[0]**9 }}", "{{ 'a'**9 }}", "{{ 'a' * 1_000_000 }}",
        "{{ 0xFFFFFF }}", "{{ 1e9 | int }}", "{{ '%9999999d' % 1 }}", "{{ '%(a)-9999999f' % m }}",
        "{{ '{:>9999999}'.format(1) }}", "{{ '{a.b!r:.9999999f}'.format(a=1) }}",
        "{{ " + 200 * "9" + " }}", "{{ 'a' * ('9999999' | int) }}", "{{ ('%' ~ '9999999d') % 1 }}",
    ],
)  # fmt: skip
def test_operations_that_fill_any_memory_are_refused(source, tokenizer):
    tokenizer.chat_template = source
    with pytest.raises(ValueError, match="no powers and no numbers of more than six digits"):
        apply_chat_template(tokenizer, "a")


def test_nothing_is_unpickled_and_no_code_of_a_checkpoint_runs(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    folder = tmp_path / "model"
    checkpoints.write_checkpoint(folder, tokenizer=True)
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nclass X: pass\n"
    for name in ("modeling_x.py", "tokenization_x.py", "configuration_x.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(print))
    raw = json.loads((folder / "config.json").read_text())
    maps = {"auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"}}
    (folder / "config.json").write_text(json.dumps(raw | maps))
    params, _ = load(folder)
    assert jax.tree.leaves(params) and load_tokenizer(folder) is not None
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="download the safetensors version"):
        load(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization_x.X"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="auto_map to code of the checkpoint"):
        load_tokenizer(folder)
    assert not mark.exists()


@pytest.fixture
def own_programs(tmp_path_factory, monkeypatch):
    """Keeps what killed programs compile, perhaps written by half, out of the tests' folder."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))


@pytest.mark.weekly
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("kind", kills.WRITERS)
def test_who_is_killed_while_writing_loses_nothing_that_was_finished(kind, tmp_path):
    found = kills.kill(kind, kills=4, seed=0, folder=tmp_path)
    assert found["versions"] >= found["kills"] == 4  # more versions depend on speed


@pytest.mark.weekly
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("kind", kills.RUNS)
def test_a_run_that_is_killed_goes_on_to_the_same_result(kind, tmp_path):
    assert kills.kill(kind, kills=1, seed=0, folder=tmp_path)["kills"] == 1
