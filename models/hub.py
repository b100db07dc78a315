"""Finds checkpoints: the bundled one, local ones, and models of the Hugging Face hub by name.

huggingface_hub fetches a name `ORG/NAME`: only configuration, tokenizer and safetensors files,
never code or pickles. The files stay in the hub's cache, where later calls find them without a
network. After an interruption, only missing files are fetched; a download that breaks inside a file
resumes where it broke.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sketchwalk_jax.models.config import (
    ADAPTER_CONFIG_FILE,
    ModelConfig,
    check_checkpoint,
    check_no_adapter,
)
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.tensor_files import INDEX_FILE, SINGLE_FILE
from sketchwalk_jax.plan import PLAN_FILE
from sketchwalk_jax.progress import elapsed, is_shown

SMALL_FILES = (
    *"config.json generation_config.json tokenizer.json tokenizer_config.json".split(),
    *"tokenizer.model vocab.json vocab.txt merges.txt tekken.json added_tokens.json".split(),
    *"special_tokens_map.json chat_template.jinja chat_template.json".split(),
    *(ADAPTER_CONFIG_FILE, INDEX_FILE, PLAN_FILE),
)
"""Configuration and tokenizer files, fetched first so that an unsupported model costs little."""

BUNDLED = "sketchwalk_8m"
"""The folder of the small trained checkpoint that ships with the package."""

_BUNDLED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = re.compile(r"[\w.-]+\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def bundled_model() -> Path:
    """Returns the folder of the bundled checkpoint, in Hugging Face's layout.

    A small Llama, trained to look up facts in long English text; the folder's `README.md` is its
    model card. It is for demonstrations, tests and comparisons of selections, not for its
    knowledge.

    Returns:
      The folder, for `sketchwalk_jax.load` and `sketchwalk_jax.text.tokenizer.load_tokenizer`.

    Raises:
      FileNotFoundError: If the installation lacks its files.

    Example:
      >>> params, model_config = load(bundled_model())  # doctest: +SKIP
    """
    folder = Path(__file__).parent / BUNDLED
    missing = [name for name in _BUNDLED_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the bundled model must be installed with the package, got {str(folder)!r} without "
            f"{', '.join(missing)}; install the package again, or pass the directory of another "
            "checkpoint"
        )
    return folder


def is_hub_name(source: str | os.PathLike[str]) -> bool:
    """Whether a string that is no local file can be the name of a model on the hub.

    Example:
      >>> [is_hub_name(x) for x in ("Qwen/Qwen3-0.6B", "./Qwen3", "a/b.gguf", "Qwen3")]
      [True, False, False, False]
    """
    name = os.fspath(source)
    return _NAME.fullmatch(name) is not None and not name.endswith(".gguf")


def find_checkpoint(
    source: str | os.PathLike[str], *, progress: bool = True, weights: bool = True
) -> Path:
    """Resolves a path or a name to a checkpoint, and downloads it if necessary.

    A local directory or file of that name takes precedence. The name `ORG/NAME` is fetched from
    `HF_ENDPOINT` with the token of `hf auth login` or `HF_TOKEN`, and stored in `HF_HOME`.

    Args:
      source: A checkpoint directory, a GGUF file, or `ORG/NAME`.
      progress: Whether to show the download on standard error.
      weights: Whether to fetch the weights too, in addition to configuration and tokenizer.

    Returns:
      The directory or GGUF file.

    Raises:
      FileNotFoundError: If there is no such directory, file or repository.
      PermissionError: If the repository is gated, and the user has no access.
      ConnectionError: If the hub cannot be reached, and the cache lacks files.
      ValueError: If the repository has no safetensors checkpoint.
      NotImplementedError: If the model is not supported; its weights are not downloaded.
    """
    if Path(source).expanduser().exists() or not is_hub_name(source):
        return check_checkpoint(os.fspath(source))
    name = os.fspath(source)
    # A log gets progress lines; on a terminal the hub's own bars are better.
    is_log = progress and not is_shown()
    waiting = elapsed(f"downloading {name}") if is_log else contextlib.nullcontext()
    with _errors_explained(name), _bars(is_wanted=progress and not is_log), waiting:
        folder = _fetch(name, SMALL_FILES)
        if not (folder / "config.json").is_file():
            check_no_adapter(folder, name)
            raise ValueError(
                f"{name} must be a repository with config.json and safetensors files, got none; of "
                f"one that holds GGUF files, download a file and pass that: "
                f"hf download {name} FILE.gguf --local-dir DIR"
            )
        if not weights:
            return folder
        ModelConfig.from_pretrained(folder)
        # Stay on the same commit, whatever is pushed meanwhile.
        files = _weight_names(folder)
        folder = _fetch(name, files, revision=folder.name)
    if not all((folder / file).is_file() for file in files):
        check_no_adapter(folder, name)
        raise ValueError(
            f"{name} must hold {', '.join(files)}, got no such files: pickled weights are never "
            f"loaded; take a repository with safetensors, or convert it with transformers' "
            f"save_pretrained"
        )
    return folder


def checkpoint_name(checkpoint: Path) -> str:
    """Names a checkpoint: by its folder or file, or by its name on the hub.

    Example:
      >>> checkpoint_name(Path("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"))
      'Qwen3-0.6B'
    """
    found = checkpoint.absolute()
    if found.parent.name == "snapshots" and found.parents[1].name.startswith("models--"):
        return found.parents[1].name.rpartition("--")[2]
    return found.resolve().name


def _weight_names(folder: Path) -> tuple[str, ...]:
    """Lists the safetensors files to fetch: the files of the index, or the single one."""
    if not (folder / INDEX_FILE).is_file():
        return (SINGLE_FILE,)
    found = read_json(folder / INDEX_FILE).get("weight_map")
    names = map(str, found.values()) if isinstance(found, dict) else ()
    # Filter names: an untrusted index may contain patterns or folders.
    return tuple(sorted({one for one in names if _WEIGHTS.fullmatch(one)})) or (SINGLE_FILE,)


def _fetch(name: str, files: tuple[str, ...], *, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    # The hub's patterns match inside folders too, whose files are never needed.
    found = snapshot_download(
        name, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]
    )
    return Path(found)


@contextlib.contextmanager
def _bars(*, is_wanted: bool) -> Iterator[None]:
    """Hides the hub's progress bars unless they are wanted."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if is_wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _errors_explained(name: str) -> Iterator[None]:
    """Turns the hub's errors into built-in ones with advice."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} is gated: ask for access at {constants.ENDPOINT}/{name}, then log in with "
            f"`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"must be an existing checkpoint directory, GGUF file, or model of the Hugging Face "
            f"hub, got {name!r}: there is no such folder here and no such model at "
            f"{constants.ENDPOINT}; for a private one, log in with `hf auth login`"
        ) from error
    except Exception as error:
        is_offline = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
        # The HTTP client's package depends on the hub's version.
        modules = {base.__module__.partition(".")[0] for base in type(error).__mro__}
        if isinstance(error, errors.HfHubHTTPError) and not is_offline:
            reason = str(error).strip().partition("\n")[0]
            raise ConnectionError(
                f"{name} cannot be downloaded from {constants.ENDPOINT}: {reason}; try again, what "
                f"is there already is kept"
            ) from error
        if not is_offline and not modules & {"httpx", "httpx2", "httpcore", "httpcore2"}:
            raise
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else reason
        raise ConnectionError(
            f"{name!r} is no folder here, and was not downloaded whole before, and the Hugging "
            f"Face hub ({constants.ENDPOINT}) cannot be reached: {reason}; try again with a "
            f"network, or pass a directory"
        ) from error
