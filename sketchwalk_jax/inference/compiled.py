"""Compiled programs: compiled side by side, and kept on disk for later processes.

JAX's own disk cache saves compiling alone. A process that finds a program there still traces and
lowers it, which takes seconds in Python. `Program` keeps the executable itself, under a key of all
that it depends on, so a later process does neither.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import platform
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.experimental import serialize_executable

from sketchwalk_jax._version import __version__
from sketchwalk_jax.pallas_kernels import dispatch

PyTree = Any

MOST_BYTES = 2**30
"""Size limit of the folder of programs. Beyond it, the least recently used programs go."""

LOADED = "/sketchwalk_jax/program_loaded"
"""The event that `jax.monitoring` reports for each program that comes from the folder."""

_MAGIC = b"sketchwalk-jax program 1\n"
_SLOW_SECONDS = 2.0
"""A compilation that takes longer says so on a terminal or in a notebook."""

# Settings of JAX that a context manager can change, and that change programs.
_SETTINGS = (
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_pallas_enable_debug_checks",
    "jax_threefry_partitionable",
)
# With these, `jax.jit` does more than to run a program.
_DEBUGGING = ("jax_check_tracer_leaks", "jax_debug_infs", "jax_debug_nans", "jax_disable_jit")
# Environment variables that change what XLA and the kernels' compiler produce.
_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")


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

    The programs of `generate`, `make_generate`, `stream` and `LanguageModel` on one device are kept
    whole, in the subfolder `programs` of at most 1 GiB, so that a later process does not even trace
    them. Loading a program executes it. So that subfolder is used only if nobody else can write it.
    While such a program compiles, JAX's cache takes no other programs of the process.

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


def programs_folder() -> Path | None:
    """The folder of whole programs, made if need be; `None` if programs are not kept.

    Warns if others can write the folder, which is then not used.
    """
    base = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache or not base or "://" in base:
        return None
    folder = Path(base) / "programs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or not _is_ours(found):
        _warn_once(
            f"{folder} must be a folder that only you can write, as loading a program from it "
            f"executes it; programs are not kept there (chmod go-w mends its mode)"
        )
        return None
    return folder if os.access(folder, os.W_OK) else None


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user can write a file or folder; where there are no modes, it is so."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return not hasattr(os, "geteuid") or (
        found.st_uid == os.geteuid() and not found.st_mode & others
    )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


class Program:
    """A jitted function whose programs are kept for later processes.

    It may be called like `jax.jit(function)`. If all arrays are known and on one device, it runs a
    program from memory, from disk, or compiled now and then kept. Else `jax.jit` runs it.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        *,
        does: str,
        static: tuple[str, ...],
        donated: str,
    ) -> None:
        """Wraps a function.

        Args:
          function: A pure function of arrays, and of static arguments by name.
          does: What the program does, for the line that tells of a slow compilation.
          static: Names of the static arguments.
          donated: Name of the donated argument.
        """
        self.jitted = jax.jit(function, static_argnames=static, donate_argnames=donated)
        self._does, self._name = does, f"{function.__module__}.{function.__qualname__}"
        self._programs: dict[Any, Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        _all.append(self)

    def __call__(self, *arrays: PyTree, **static: Any) -> PyTree:
        """Runs the program, which it compiles first if there is none."""
        found = self.compile(*arrays, **static)
        return self.jitted(*arrays, **static) if found is None else found.result()(*arrays)

    def _cache_size(self) -> int:
        """Number of programs in memory, as `jax.jit`'s own."""
        of_jit: Any = self.jitted
        return len(self._programs) + of_jit._cache_size()

    def compile(self, *arrays: PyTree, **static: Any) -> "Future[Any] | None":
        """Finds a program in memory or on disk, or begins to compile it in another thread.

        Args:
          *arrays: Arguments, arrays or their shapes.
          **static: Static arguments.

        Returns:
          A `Future` of the program; `None` if `jax.jit` runs it.
        """
        device = _device_of(arrays)
        if device is None:
            return None
        leaves, structure = jax.tree.flatten(arrays)
        kinds = tuple((x.shape, x.dtype, bool(getattr(x, "weak_type", False))) for x in leaves)
        settings = (_settings(), dispatch.kernels_here())
        key = (tuple(static.items()), structure, kinds, settings, device)
        with self._lock:
            if key in self._programs:
                return self._programs[key]
            found = self._programs[key] = Future[jax.stages.Compiled]()
        told = contextlib.ExitStack()

        def fail(error: BaseException) -> None:
            with self._lock:  # another call tries again, and nothing keeps what the error holds
                self._programs.pop(key, None)
            told.close()
            found.set_exception(error)

        def compile_and_keep() -> None:
            try:
                with told, _whole() if path else contextlib.nullcontext(lambda: False) as is_whole:
                    compiled = _compile(lowered, _compiler_options(device))
                if path is not None and is_whole():
                    _save(path, compiled)
                found.set_result(compiled)
            except BaseException as error:
                fail(error)

        try:
            path = _path_of(_describe((self._name, static, str(structure), str(kinds))), device)
            loaded = None if path is None else _load(path, arrays, device)
            if loaded is not None:
                found.set_result(loaded)
                return found
            told.enter_context(_telling(self._does, is_kept=path is not None))
            # Python lowers one program after another, but XLA compiles them side by side.
            lowered = self.jitted.lower(*arrays, **static)
            _pool().submit(compile_and_keep)
        except BaseException as error:
            fail(error)
            raise
        return found


_from_cache = threading.local()
_whole_lock, _whole_now = threading.Lock(), list[dict[str, Any]]()  # JAX's settings, by block


@contextlib.contextmanager
def _whole() -> Iterator[Callable[[], bool]]:
    """Keeps what the block compiles out of JAX's disk cache; yields whether it succeeded.

    A program from that cache lacks parts on CPUs if it is written again. So programs are not
    written to it, and other keys than JAX's usual ones find none.
    """
    ours = {
        "jax_persistent_cache_min_compile_time_secs": float("inf"),
        "jax_compilation_cache_include_metadata_in_key": True,
    }
    _listen_to_jax_cache()
    _from_cache.hits = 0
    with _whole_lock:
        usual = {name: getattr(jax.config, name) for name in ours}
        _whole_now.append(_whole_now[0] if _whole_now else usual)
        for name, value in ours.items():
            jax.config.update(name, value)
    try:
        yield lambda: not _from_cache.hits
    finally:
        with _whole_lock:
            usual = _whole_now.pop()
            for name, value in ({} if _whole_now else usual).items():
                if getattr(jax.config, name) == ours[name]:  # not changed meanwhile
                    jax.config.update(name, value)


@functools.cache
def _listen_to_jax_cache() -> None:
    def count(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _from_cache.hits = getattr(_from_cache, "hits", 0) + 1

    jax.monitoring.register_event_listener(count)


_all = list[Program]()


def forget_programs() -> None:
    """Forgets all programs in memory, as `jax.clear_caches` forgets those of `jax.jit`."""
    for program in _all:
        with program._lock:
            program._programs.clear()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, thread_name_prefix="sketchwalk-compile")


def _device_of(arrays: PyTree) -> jax.Device | None:
    """The only device of arrays, or JAX's default one; `None` if `jax.jit` must run the call."""
    if any(getattr(jax.config, name) for name in _DEBUGGING):
        return None
    devices: set[jax.Device] = set()
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.core.Tracer):
            return None
        if isinstance(leaf, jax.Array):
            if leaf.committed:
                devices |= leaf.devices()
            elif len(leaf.devices()) > 1:
                return None
    if len(devices) > 1:
        return None
    (device,) = devices or {_default_device()}
    return device if device.process_index == jax.process_index() else None


def _default_device() -> jax.Device:
    found = jax.config.jax_default_device
    return found if isinstance(found, jax.Device) else jax.local_devices(backend=found)[0]


def _compiler_options(device: jax.Device) -> dict[str, Any] | None:
    """Options of XLA: on GPUs, matrix products as cuBLAS chooses them, without measuring.

    Measuring takes more than half of the time to compile, and makes a program depend on chance.
    Without it, XLA's own matrix products (Triton) would be up to 60 times slower.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if device.platform != "gpu" or "autotune" in flags or "triton" in flags:
        return None
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if options is None or "No such compile option" not in str(error):
            raise
        return lowered.compile()  # another version of XLA


@contextlib.contextmanager
def _telling(does: str, *, is_kept: bool) -> Iterator[None]:
    """Writes one line on a terminal or in a notebook if the block takes long."""
    is_shown = "ipykernel" in sys.modules
    with contextlib.suppress(AttributeError, ValueError):  # no terminal, or closed
        is_shown |= sys.stderr.isatty()
    later = "later processes load it" if is_kept else "it is not kept for later processes"
    line = f"compiling the program that {does}: this session does so once, and {later}"
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    if is_shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Files.


def _describe(value: Any) -> str | None:
    """Describes static arguments in full; `None` if one holds something unknown.

    The code of a policy of one's own, say, may change from process to process, and a kernel in the
    interpreter calls back into this one.
    """
    try:
        return _text_of(value)
    except TypeError:
        return None


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, np.generic | np.dtype):
        return f"{type(value).__name__}({value})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_text_of(one)}' for name, one in value.items())}}}"
    cls = type(value)
    if not dataclasses.is_dataclass(value) or not cls.__module__.startswith("sketchwalk_jax."):
        raise TypeError(f"cannot describe a {cls.__name__}")
    if getattr(value, "interpret", False):
        raise TypeError("an interpreted kernel calls back into this process")
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return f"{cls.__module__}.{cls.__qualname__}{_text_of(fields)}"


def _path_of(described: str | None, device: jax.Device) -> Path | None:
    """The file of a program on a device; `None` if it is not kept."""
    folder = None if described is None else programs_folder()
    if folder is None:
        return None
    machine = (described, _settings(), _code_here(), _environment(device))
    return folder / hashlib.sha256(repr(machine).encode()).hexdigest()


def _settings() -> tuple[tuple[str, str], ...]:
    """JAX's settings without those of its disk cache."""
    values = jax.config.values
    here = {name: getattr(jax.config, name) for name in _SETTINGS if name in values}
    found = ((name, str(value)) for name, value in (values | here).items() if "_cache_" not in name)
    return tuple(sorted(found))


def _environment(device: jax.Device) -> tuple[Any, ...]:
    """All of the machine and the installed software that a program depends on."""
    variables = [os.environ.get(name) for name in _VARIABLES]
    names = ("compute_capability", "core_count", "device_kind", "id", "platform")
    of_device = [str(getattr(device, name, None)) for name in names]
    return (*_installed(), device.client.platform_version, of_device, jax.device_count(), variables)


@functools.cache
def _installed() -> tuple[Any, ...]:
    of_cuda_12 = "jax-cuda12-plugin", "nvidia-cublas-cu12", "nvidia-cudnn-cu12"
    of_cuda_13 = "jax-cuda13-plugin", "nvidia-cublas", "nvidia-cudnn-cu13"
    packages = ("jax", "jaxlib", "numpy", *of_cuda_12, *of_cuda_13)
    versions = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((name, importlib.metadata.version(name)))
    machine: list[str] = [platform.platform(), platform.python_version()]
    with contextlib.suppress(OSError):
        machine.append(Path("/proc/driver/nvidia/version").read_text())
    with contextlib.suppress(OSError):  # the instructions that this processor has
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        machine += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return tuple(versions), tuple(machine)


@functools.cache
def _code_here() -> str:
    """A hash of the package's code."""
    total = hashlib.sha256(__version__.encode())
    # In a checkout, the last two are beside the package.
    for name in ("", ".models", ".pallas_kernels"):
        file = importlib.import_module(f"sketchwalk_jax{name}").__file__
        for path in sorted(Path(file or "").parent.rglob("*.py")):
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def _load(path: Path, arrays: PyTree, device: jax.Device) -> "jax.stages.Compiled | None":
    """Loads a program; `None` if there is none, or the file is damaged or not ours."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            raw = file.read() if _is_ours(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    head = len(_MAGIC)
    digest, content = raw[head : head + 32], raw[head + 32 :]
    if raw[:head] != _MAGIC or hashlib.sha256(content).digest() != digest:
        return None
    # Without Mosaic's runtime, kernels cannot be loaded. Importing all of Mosaic takes longer.
    for prepare in (_find_kernel_runtime, _import_mosaic) if device.platform == "gpu" else (None,):
        with contextlib.suppress(Exception):  # whatever is wrong, compiling replaces the file
            if prepare is not None:
                prepare()
            payload, outputs = pickle.loads(content)  # nobody else can write the folder
            inputs = jax.tree.structure((arrays, {}))
            found = serialize_executable.deserialize_and_load(
                payload, inputs, outputs, device.client, [device]
            )
            os.utime(path)  # the least recently used programs are removed first
            jax.monitoring.record_event(LOADED)
            return found
    return None


def _import_mosaic() -> None:
    importlib.import_module("jax.experimental.mosaic.gpu")


def _find_kernel_runtime() -> None:
    """Tells XLA where the runtime of Mosaic's kernels is, as importing Mosaic does."""
    if "MOSAIC_GPU_RUNTIME_LIB_PATH" in os.environ:
        return
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        found = importlib.util.find_spec(name)
        for root in found.submodule_search_locations or () if found else ():
            runtime = Path(root) / "libmosaic_gpu_runtime.so"
            if runtime.exists():
                os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
                return


def _save(path: Path, compiled: jax.stages.Compiled) -> None:
    """Writes a program in one step; a full disk or a program that cannot be kept is no error."""
    try:
        payload, _, outputs = serialize_executable.serialize(compiled)
        content = pickle.dumps((payload, outputs))
    except Exception:  # JAX says in several ways that it cannot
        return
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Removes the least recently used programs, down to the folder's limit."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


_code_here()  # of what is imported, not of what an update writes later
