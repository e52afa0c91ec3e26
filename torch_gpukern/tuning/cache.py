# SPDX-License-Identifier: BSD-3-Clause
"""The file of tuned kernels: the instances that were measured to be fastest, by device name and
tuning key.

`import torch_gpukern` reads the file once and passes every entry to the library. The library looks
up a device's name when that device is first used. So the import needs no GPU, a call has no overhead in
Python, and the choice applies to all threads. A C program calls gk_gemm_prefer_class instead.

The file is JSON; <key> is a tuning key, and "row" and "default" are names of instances:

    {"format": 1,
     "devices": {"NVIDIA H200": {
         "gpukern": "0.1.0",
         "gemm": {<key>: {"row": .., "us": .., "default": .., "default_us": .., "cublas_us": ..}}}}}

If something is wrong with the file, a warning says so once. The file, or the wrong part of it, is
then ignored, and calls run their default instances.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from .._library import ops

__all__ = ["default_path", "entries_of", "read", "save", "use"]

FORMAT = 1
VERSION: str = ops.version.default()
TUNE = "run `python -m torch_gpukern tune gemm`"

_warned: set[str] = set()


def default_path() -> Path | None:
    """The path in GPUKERN_TUNED, or None if that is "off". Without GPUKERN_TUNED:
    gpukern/tuned.json in the user's cache directory, or None if there is no such directory."""
    asked = os.environ.get("GPUKERN_TUNED", "")
    if asked:
        return None if asked.lower() == "off" else Path(asked)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA", "")
    elif os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
        # the XDG standard says to ignore a relative path
        folder = os.environ["XDG_CACHE_HOME"]
    else:
        folder = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(folder) / "gpukern" / "tuned.json" if os.path.isabs(folder) else None


def _warn(path: Path, problem: str, advice: str = f"{TUNE} again, or delete the file") -> None:
    """Warns, once for each file."""
    if str(path) not in _warned:
        _warned.add(str(path))
        problem = " ".join(problem.split())  # one line, whatever the file contains
        # stacklevel 4 is the line that imports the package: above _warn, use() and the package
        warnings.warn(
            f"torch_gpukern: tuned kernels in {path} are not used: {problem}: {advice}",
            stacklevel=4,
        )


# ---- reading -------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, dict], str]:
    """(the file's "devices", what is wrong with the file or ""). A missing file counts as empty."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"it cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError) as error:
        return {}, f"it is not JSON ({str(error)[:80]})"
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        return {}, f"it is not of format {FORMAT}"
    devices = stored.get("devices")
    if not isinstance(devices, dict):
        return {}, "it has no devices"
    return devices, ""


def entries_of(device: object) -> tuple[dict[str, dict], str]:
    """(the valid entries {tuning key: {"row": ..}} of a device of the file, what is wrong with the
    others or ""). Entries of another version of gpukern are not valid."""
    if not isinstance(device, dict) or not isinstance(device.get("gemm"), dict):
        return {}, "has no entries for gemm"
    if device.get("gpukern") != VERSION:
        return {}, f"was measured by gpukern {str(device.get('gpukern'))[:20]}, this is {VERSION}"
    entries = device["gemm"]
    good = {
        key: x
        for key, x in entries.items()
        if isinstance(x, dict) and x.get("row") and isinstance(x["row"], str)
    }
    left_out = len(entries) - len(good)
    return good, f"has {left_out} entries without a row" if left_out else ""


def use(path: Path | None = None) -> int:
    """Passes the file's entries to the library and returns how many it accepted. Wrong contents of the
    file give a warning, never an exception."""
    named = path is None and os.environ.get("GPUKERN_TUNED")
    path = path or default_path()
    if path is None or not ops.cuda_kernels.default():
        return 0
    devices, problem = read(path)
    # `python -m torch_gpukern tune` and `gpukern tune` are about to create the file
    tuning = sys.argv[1:2] == ["tune"] and (
        sys.argv[0] == "-m" or Path(sys.argv[0]).stem == "gpukern"
    )
    if named and not tuning and not devices and not problem and not path.exists():
        _warn(
            path,
            "GPUKERN_TUNED names it and it does not exist",
            f"{TUNE} to make it, or unset GPUKERN_TUNED",
        )
    problems = [problem] if problem else []
    taken = 0
    for name, device in devices.items():
        entries, problem = entries_of(device)
        refused = []
        for gemm_class, entry in entries.items():
            try:
                ops.gemm_prefer.default(name, gemm_class, entry["row"])
                taken += 1
            except (ValueError, RuntimeError) as error:
                refused.append(str(error).splitlines()[0].removeprefix("gpukern::gemm_prefer: "))
        if refused:
            problem += (
                f"{' and ' if problem else ''}has {len(refused)} entries that this library "
                f"refuses ({refused[0]})"
            )
        if problem:
            problems.append(f"{name[:63]} {problem}")
    if problems:
        _warn(path, "; ".join(problems))
    return taken


# ---- writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A context with a lock on a folder, so that only one process writes. On a file system without
    locks the last writer wins. The file is complete in any case."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def save(path: Path, device: str, entries: Mapping[str, dict | None]) -> None:
    """Adds entries of a device to the file; entries that are None are removed.

    Other entries and devices stay. A device's entries of another version of gpukern are dropped,
    and so is the whole contents of a file in another format. Readers see the old file or the new
    one, never a part. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        devices, problem = read(path)
        if problem and path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        kept, _ = entries_of(devices.get(device))
        kept.update({key: entry for key, entry in entries.items() if entry is not None})
        for key in [key for key, entry in entries.items() if entry is None]:
            kept.pop(key, None)
        devices[device] = {"gpukern": VERSION, "gemm": kept}
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"format": FORMAT, "devices": devices}, file, indent=1)
                file.write("\n")
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
