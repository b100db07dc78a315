"""Reads many prompts from a JSON-lines file, and adds their texts to another line by line.

Every line is written whole: a run that is killed loses at most its current batch. A second file
holds the settings of the texts; a run with other settings cannot continue them.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Key

from sketchwalk_jax.cli import prompt
from sketchwalk_jax.inference.sampling import Sampling
from sketchwalk_jax.language_model import Completion, LanguageModel
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.progress import progress_bar
from sketchwalk_jax.text.tokenizer import apply_chat_template

_ADVICE = "pass --overwrite to start afresh, or another --out"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the prompts.

    Attributes:
      content: The line's JSON value.
      tokens: The tokens of its prompt, int32.
      is_chat: Whether the prompt is a conversation, and its text an answer.
    """

    content: Any
    tokens: Int[np.ndarray, "T"]
    is_chat: bool


def read_prompts(
    path: Path,
    tokenizer: Any,
    *,
    is_chat: bool,
    system: str | None,
    model_config: ModelConfig,
    max_new_tokens: int,
) -> list[Entry]:
    """Reads all prompts: each line a string, or an object with `"prompt"` or `"messages"`.

    An object may have `"tools"` for the chat template; other keys are kept unused. Empty lines are
    skipped. Prompts become the user's turn in the chat template if `is_chat`, messages always. All
    must fit into the model's context with `max_new_tokens`.

    Raises:
      ValueError: If a line is invalid or does not fit, with its number; or if there is no prompt.
      OSError: If the file cannot be read.
    """
    entries = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            tokens = _tokens_of(content, tokenizer, is_chat, system, model_config)
            prompt.check_tokens(tokens, max_new_tokens=max_new_tokens, model_config=model_config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path}: {error}") from error
        has_messages = isinstance(content, dict) and "messages" in content
        entries.append(Entry(content, tokens, is_chat or has_messages))
    if not entries:
        raise ValueError(f"{path} must hold a prompt, got none")
    return entries


def _tokens_of(
    content: Any, tokenizer: Any, is_chat: bool, system: str | None, model_config: ModelConfig
) -> Int[np.ndarray, "T"]:
    given = content if isinstance(content, dict) else {"prompt": content}
    messages, text = given.get("messages"), given.get("prompt")
    if ("messages" in given) == ("prompt" in given):
        raise ValueError(f'must be a string, or an object with "prompt" or "messages", got {given}')
    if "messages" in given:
        is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        if not is_list or not messages:
            raise ValueError(f'"messages" must be a list of objects, got {str(messages)[:80]}')
        return apply_chat_template(tokenizer, messages, **_tools_of(given, tokenizer))
    if not isinstance(text, str):
        raise ValueError(f'"prompt" must be a string, got {str(text)[:80]}')
    if given.get("tools") and not is_chat:
        raise ValueError('"tools" must stand beside "messages", got "prompt"; or pass --chat')
    prompt.check_size(text, tokenizer, model_config=model_config)
    tools = _tools_of(given, tokenizer)
    return prompt.tokenize(tokenizer, text, is_chat=is_chat, system=system, **tools)


def _tools_of(given: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns a line's tools as arguments of the chat template."""
    tools = given.get("tools")
    if not tools and isinstance(tools, list | None):
        return {}
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise ValueError(f'"tools" must be a list of objects, got {str(tools)[:80]}')
    if tokenizer.chat_template and "tools" not in str(tokenizer.chat_template):
        raise ValueError('"tools" must be left out: the chat template of the model has none')
    return {"tools": tools}


class TextsFile:
    """The texts so far, one JSON object a line, in the order in which they were finished.

    Attributes:
      path: The file.
      entries: All prompts.
      missing: Indices of entries without a text when the file was opened.
      num_texts: Number of texts in the file.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[Entry],
        settings: Mapping[str, Any],
        *,
        overwrite: bool,
    ) -> None:
        """Opens the file, to continue it if it exists, or to `overwrite` it.

        `settings` is everything else that the texts depend on, as JSON.

        Raises:
          ValueError: If the file has other prompts or settings, or is damaged.
          OSError: If it cannot be read or written.
        """
        self.path, self.entries = path, entries
        digest = hashlib.sha256()
        for one in entries:
            digest.update(json.dumps([one.content, one.tokens.tolist()]).encode())
        now = {**settings, "prompts": len(entries), "sha256": digest.hexdigest()}
        there = path.with_name(f"{path.name}.settings.json")
        done = set[int]()
        if overwrite or not path.exists():
            path.write_bytes(b"")  # first remove the texts of the old settings
            there.unlink(missing_ok=True)
        if not path.stat().st_size and not there.exists():
            _write_whole(there, json.dumps(now, indent=1) + "\n")
        else:
            self._compare(there, json.loads(json.dumps(now)))
            done = self._read()
        self.missing = [index for index in range(len(entries)) if index not in done]
        self.num_texts = len(done)

    def _compare(self, there: Path, now: Mapping[str, Any]) -> None:
        """Raises a `ValueError` unless the texts that are there have the same settings."""
        try:
            old = json.loads(there.read_text(encoding="utf-8"))
            differing = [name for name in sorted({*old, *now}) if old.get(name) != now.get(name)]
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} must stand beside {there.name}, which says what its texts depend on, "
                f"got it alone; {_ADVICE}"
            ) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{there} is damaged; {_ADVICE}") from error
        if "sha256" in differing:
            raise ValueError(
                f"{self.path} must hold texts of the same prompts, got those of others: the file "
                f"of prompts, the tokenizer or --chat has changed; {_ADVICE}"
            )
        if differing:
            found = "; ".join(
                f"{name} {str(old.get(name))[:40]} there, {str(now.get(name))[:40]} now"
                for name in differing
            )
            raise ValueError(
                f"{self.path} must hold texts of the same settings, got {found}; {_ADVICE}"
            )

    def _read(self) -> set[int]:
        """Reads the indices of the finished texts, and cuts off an incomplete last line."""
        lines, done = self.path.read_bytes().splitlines(keepends=True), set[int]()
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(self.path, sum(map(len, lines[:-1])))
            lines.pop()
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                index, _ = found["index"], found["text"]
                if not 0 <= index < len(self.entries) or index in done:
                    raise ValueError(index)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {self.path} must be a text of this run, got "
                    f"{line[:40]!r}; {_ADVICE}"
                ) from error
            done.add(index)
        return done

    def add(self, index: int, found: Completion) -> None:
        """Writes a text as one line, and flushes it to the operating system."""
        content = {"index": index, "input": self.entries[index].content}
        line = json.dumps(content | rounded(dataclasses.asdict(found)), ensure_ascii=False)
        with self.path.open("ab") as file:
            file.write(f"{line}\n".encode())
        self.num_texts += 1

    def sort(self) -> None:
        """Puts the lines into the order of the prompts."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: json.loads(line)["index"])
        if ordered != lines:
            _write_whole(self.path, b"".join(ordered).decode())


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds floats to four places."""
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in values.items()}


def _write_whole(path: Path, text: str) -> None:
    """Replaces a file by a complete one, or leaves it unchanged."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="")
    os.replace(partial, path)


def _run_until_stopped(work: Callable[[], None], say: Callable[[], None]) -> None:
    """Runs `work`, and calls `say` if an error or an interrupt ends it.

    If SIGINT ends the process at once, as on the command line, `work` runs in a thread: Python
    handles signals in the main thread, which would wait until JAX has computed a batch.
    """
    is_at_once = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    try:
        if is_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            concurrent.futures.ThreadPoolExecutor(1).submit(work).result()
        else:
            work()
    except BaseException as error:
        say()
        if is_at_once and isinstance(error, KeyboardInterrupt):
            os._exit(130)
        raise
    finally:
        if is_at_once:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def complete_all(
    lm: LanguageModel,
    texts: TextsFile,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: Key[Array, ""],
    batch_size: int | None,
) -> None:
    """Generates and writes the missing texts in batches, with progress on standard error.

    Prompt `i` samples with `fold_in(key, i)`, so that a continued run gives the same texts.
    """
    total, before = len(texts.entries), texts.num_texts
    entries = [texts.entries[index] for index in texts.missing]
    broken = list[int]()

    def complete() -> None:
        finished = lm.complete(
            [one.tokens for one in entries],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            key_ids=texts.missing,
            batch_size=batch_size,
            is_answer=[one.is_chat for one in entries],
        )
        with progress_bar(total, "generating", unit=" prompts", initial=before) as bar:
            for place, found in finished:
                texts.add(texts.missing[place], found)
                broken.extend([] if found.is_finite else [place])
                bar.update()

    def say_kept() -> None:
        print(
            f"\n{texts.path}: stopped; it keeps {texts.num_texts} of {total} texts, and the same "
            f"command goes on with the others",
            file=sys.stderr,
            flush=True,
        )

    _run_until_stopped(complete, say_kept)
    texts.sort()
    more = f", {before} of them from before" if before else ""
    print(f"{texts.path}: {total} texts{more}", file=sys.stderr)
    if broken:
        warnings.warn(
            f"logits were NaN or infinite for {len(broken)} prompts, whose texts mean nothing "
            f'("is_finite" is false there)',
            stacklevel=1,
        )
