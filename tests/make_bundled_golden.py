"""Makes `tests/goldens/bundled.npz` with transformers; run it when the bundled model changes.

    python tests/make_bundled_golden.py

It needs torch and transformers (the interpreter of SKETCHWALK_REFERENCE_PYTHON), and makes the same
file every time. Two prompts hide a fact in the licence and ask for it.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))

from reference_worker import run  # noqa: E402

MODEL = ROOT / "models" / "sketchwalk_8m"
FACTS = (("river", "68084", 0.2), ("button", "31597", 0.7))
NUM_TOKENS, NEW_TOKENS = 1024, 12


def make_prompt(tokenizer, text: list[int], word: str, number: str, depth: float) -> list[int]:
    """Returns `NUM_TOKENS` tokens: the licence with a fact in it, and the question."""

    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    statement = encode(f" The code of {word} is {number}.")
    question = encode(f" Q: code of {word}? A:")
    room = NUM_TOKENS - len(statement) - len(question)
    place = int(depth * room)
    return text[:place] + statement + text[place:room] + question


def main() -> None:
    """Writes the file."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    licence = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    text = tokenizer(licence)["input_ids"]
    prompts = [make_prompt(tokenizer, text, *fact) for fact in FACTS]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = {
            "name": "bundled",
            "directory": str(MODEL),
            "prompts": [prompts],
            "new_tokens": NEW_TOKENS,
        }
        run({"checkpoints": [checkpoint]}, Path(folder))
        expected = np.load(Path(folder) / "bundled" / "expected.npz")
        path = ROOT / "tests" / "goldens" / "bundled.npz"
        np.savez(path, numbers=[number for _, number, _ in FACTS], **expected)
    answers = [tokenizer.decode(row) for row in expected["greedy"]]
    print(f"{path.name}: {path.stat().st_size} bytes, answers {answers}")


if __name__ == "__main__":
    main()
