"""Compiled programs kept between runs, so that the second run starts at once."""

import os
from pathlib import Path

import jax


def cache_directory() -> Path:
    """Where compiled programs are kept: in the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sketchwalk-jax" / "compiled"


def keep_compiled_programs() -> None:
    """Turns JAX's persistent compilation cache on, unless JAX is told already what to do.

    `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE` keep their meaning. Where the
    folder cannot be written, programs are compiled in every run.
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
