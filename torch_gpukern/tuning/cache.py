# SPDX-License-Identifier: BSD-3-Clause
"""The file of tuned kernels: which instances were measured to be fastest, by device name and tuning
key.

`import torch_gpukern` reads it once and hands every entry to the library, which looks a device's
name up when that device is first used. So nothing asks for a GPU at import, no call pays for
Python, and every thread and every later call is served. A C program does the same with
gk_gemm_prefer_class.

    {"format": 1,
     "devices": {"NVIDIA H200": {"gpukern": "0.1.0",
                                 "gemm": {<class>: {"row": .., "us": .., "default": .., "default_us": .., "cublas_us": ..}}}}}

What is wrong with a file is said once, by a warning; the file, or the part that is wrong, is then
not used, and calls run the rows that they run without it.
"""  # noqa: E501

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
    """GPUKERN_TUNED, a path, or None for "off"; without it tuned.json in the user's cache
    directory."""
    asked = os.environ.get("GPUKERN_TUNED", "")
    if asked:
        return None if asked.lower() == "off" else Path(asked)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA", "")
    elif os.path.isabs(
        os.environ.get("XDG_CACHE_HOME", "")
    ):  # a relative one is to be ignored, says its standard
        folder = os.environ["XDG_CACHE_HOME"]
    else:
        folder = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(folder) / "gpukern" / "tuned.json" if os.path.isabs(folder) else None


def _warn(path: Path, problem: str, advice: str = f"{TUNE} again, or delete the file") -> None:
    """Once for each file."""
    if str(path) not in _warned:
        _warned.add(str(path))
        problem = " ".join(problem.split())  # one line, whatever the file holds
        # at import, the line that imports: above this function, use() and the package
        warnings.warn(
            f"torch_gpukern: tuned rows in {path} are not used: {problem}: {advice}", stacklevel=4
        )


# ---- reading -------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, dict], str]:
    """The file's devices, and what is wrong with it, "" if nothing. A file that is not there is
    empty."""
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
    """The entries {class: {"row": ..}} of a device of the file that are of this version and in
    order; what is wrong."""
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
    """Hands the file's entries to the library: how many it took. Never raises for what the file
    holds."""
    named = path is None and os.environ.get("GPUKERN_TUNED")
    path = path or default_path()
    if path is None or not ops.cuda_kernels.default():
        return 0
    devices, problem = read(path)
    # python -m torch_gpukern tune, or gpukern tune, is about to make the file
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
            problem += f"{' and ' if problem else ''}has {len(refused)} entries that this library refuses ({refused[0]})"  # noqa: E501
        if problem:
            problems.append(f"{name[:63]} {problem}")
    if problems:
        _warn(path, "; ".join(problems))
    return taken


# ---- writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One writer at a time in a folder, where its file system has locks; else the last one wins,
    with a whole file."""
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
    """Adds entries of a device to the file, or takes out those that are None. Other entries and
    devices stay as they are; a device's entries of another version, and a file that is none of
    ours, make way.

    Readers see the old file or the new one, never a part. Raises OSError where the file cannot be
    written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
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
