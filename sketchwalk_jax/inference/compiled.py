"""Keeps compiled programs on disk, for the next process that needs them."""

import functools
import os
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Keeps compiled programs on disk, so that a later process does not compile them again.

    This turns on JAX's persistent compilation cache for every program that the process compiles
    from then on. If you have already configured that cache, your settings stay. The first call of
    `generate`, `stream`, `prefill`, `decode_step` or `forward` calls this function, and so does the
    command line. Importing the package changes no setting of JAX. Call this function earlier to
    keep programs that are compiled before.

    The folder is `sketchwalk-jax/compiled` in `$XDG_CACHE_HOME`, or else in `~/.cache`. You may
    delete it at any time. If it cannot be written, nothing is kept. `JAX_COMPILATION_CACHE_DIR`
    sets another folder. `JAX_ENABLE_COMPILATION_CACHE=false`, or
    `jax.config.update("jax_enable_compilation_cache", False)`, turns the cache off.

    Example:
      >>> import sketchwalk_jax as sw
      >>> sw.keep_compiled_programs()  # doctest: +SKIP
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "sketchwalk-jax" / "compiled"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


keep_by_default = functools.cache(keep_compiled_programs)
"""Calls `keep_compiled_programs` once per process; later changes of JAX's settings stay."""
