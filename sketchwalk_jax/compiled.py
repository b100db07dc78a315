"""Compiled programs are kept on disk, for the next process that needs them."""

import os
from pathlib import Path

import jax


def cache_directory() -> Path:
    """Where compiled programs are kept: in the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sketchwalk-jax" / "compiled"


def keep_compiled_programs() -> None:
    """Keeps compiled programs on disk, so that a later process need not compile them again.

    It turns JAX's persistent compilation cache on, for every program of this process, unless JAX
    is told already what to do: `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE` keep
    their meaning. The folder is `sketchwalk-jax/compiled` in `$XDG_CACHE_HOME`, or else in
    `~/.cache`; where it cannot be written, nothing is kept. Call it once, in the first cell of a
    notebook: importing the package changes no setting of JAX. The command line calls it.

    Example:
      >>> import sketchwalk_jax as sw
      >>> sw.keep_compiled_programs()  # doctest: +SKIP
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
