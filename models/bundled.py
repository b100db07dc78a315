"""The small trained checkpoint that ships with the package."""

from pathlib import Path

NAME = "sketchwalk_8m"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def bundled_model() -> Path:
    """The folder of the checkpoint that ships with the package, in Hugging Face's layout.

    A small Llama, trained to look up facts in long English text; the folder's `README.md` is its
    model card. It is for demonstrations, tests and comparisons of selections, not for its
    knowledge.

    Returns:
     The folder, for `sketchwalk_jax.load` and `sketchwalk_jax.tokenizer.load_tokenizer`.

    Raises:
     FileNotFoundError: If the installation lacks its files.

    Example:
     >>> params, model_config = load(bundled_model())  # doctest: +SKIP
    """
    folder = Path(__file__).parent / NAME
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the bundled model must be installed with the package, got {str(folder)!r} without "
            f"{', '.join(missing)}; install the package again, or pass the directory of another "
            "checkpoint"
        )
    return folder
