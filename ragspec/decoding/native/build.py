"""Compiles the kernels for this machine, once, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ragspec.decoding.native import abi

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_SOURCES = sorted(_HERE.glob("*.cpp"))
#: Contraction off: see `multiply_add` in lanes.h.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_COMPILERS = ("g++", "clang++", "c++")


class BuildError(Exception):
    """No compiler, or one that refuses the kernels; the message says which."""


def load_kernels(folder: Path, machine: str = "native") -> ctypes.CDLL:
    """The kernels' library, compiled into `folder` unless it lies there already for these sources, compiler and processor.

    Args:
        folder: made if it is missing.
        machine: the processor to compile for, as the compiler's -march (-mcpu on ARM) calls it.

    Raises:
        BuildError: there is no C++ compiler, it fails, or the folder cannot be used.
    """
    compiler = _compiler()
    command = [
        compiler,
        *_FLAGS,
        f"-mcpu={machine}" if platform.machine() in {"aarch64", "arm64"} else f"-march={machine}",
    ]
    library = folder / f"kernels-{_key(command)}.so"
    try:
        if not library.exists():
            _compile(command, library)
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        msg = f"the kernels cannot be put into {folder} and loaded from there: {error}"
        raise BuildError(msg) from error
    _compare_layout(kernels)
    return kernels


def _compare_layout(kernels: ctypes.CDLL) -> None:
    """The two languages say the same of structures and constants, or nothing may be called."""
    found = (ctypes.c_int32 * len(abi.LAYOUT))()
    kernels.ragspec_layout(found)
    if tuple(found) != abi.LAYOUT:
        msg = f"step.h says {tuple(found)} where abi.py says {abi.LAYOUT}"
        raise RuntimeError(msg)


def _compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    msg = f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the PATH"
    raise BuildError(msg)


def _key(command: list[str]) -> str:
    """What a compiled library is good for: sources, compiler, flags, processor."""
    digest = hashlib.sha256()
    for source in sorted(_HERE.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    digest.update(version + "\0".join(command).encode() + _processor())
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _compile(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        run = subprocess.run(
            [*command, *map(str, _SOURCES), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            msg = f"{command[0]} does not compile the kernels: {run.stderr.strip()[-2000:]}"
            raise BuildError(msg)
        made.replace(library)  # at once: another worker may be loading it
    log.info("kernels compiled", extra={"action": "compile_kernels", "library": str(library)})
