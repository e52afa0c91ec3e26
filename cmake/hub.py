# SPDX-License-Identifier: BSD-3-Clause
"""Makes the layout of Hugging Face's kernels hub:
DIR/build/torch-stable-abi210-<backend>-<machine>-linux/.

    make hub                     into build/hub
    python cmake/hub.py DIR      from the build folder `build`, which `make build` has configured

A variant is the package with a plugin whose ops have a namespace of their own,
torch.ops._gpukern_<backend>_<digest of the sources>, so that it loads beside an installed gpukern
and beside other builds. Its module has flash-attn's functions besides gpukern's, which is what
transformers asks a kernel of attention for. A build with the CUDA half gives two variants, for that
version of CUDA and for a torch without CUDA: one library serves both, but the kernels package takes
one by its name.

    kernels.get_local_kernel(Path("build/hub"))
    LOCAL_KERNELS=you/gpukern-flash-attn3=build/hub     for set_attn_implementation("you/gpukern-flash-attn3")
"""

import base64
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PACKAGE = ROOT / "torch_gpukern"
PLUGIN = "libgpukern_torch.so"
SOURCES = ("CMakeLists.txt", "cmake", "csrc", "ops", "torch_gpukern")
EXPORTS = """
from .integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

__all__ += ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
"""


def digest_of_sources() -> str:
    files = [
        p
        for name in SOURCES
        for p in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    whole = hashlib.sha256()
    for path in sorted(p for p in files if p.is_file() and p.suffix not in (".so", ".pyc")):
        whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:10]


def configure(*options: str) -> None:
    """By this interpreter's torch: another one may have configured the folder last."""
    command = [
        "cmake",
        str(BUILD),
        f"-DPython_EXECUTABLE={sys.executable}",
        *options,
        "--log-level=NOTICE",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def build(namespace: str) -> Path:
    """The plugin with its ops in `namespace`."""
    configure(f"-DGPUKERN_HUB_NAMESPACE={namespace}")
    subprocess.run(
        ["cmake", "--build", str(BUILD), "--target", "gpukern_hub"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return BUILD / "libgpukern_hub.so"


def metadata(namespace: str, backend: str, variant: Path) -> dict:
    name, _, archs = backend.partition(" ")
    about = (
        {"type": "cpu"}
        if name == "cpu"
        else {"type": "cuda", "archs": [_dotted(a) for a in archs.split(";")]}
    )
    files = {
        str(path.relative_to(variant)): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    return {
        "id": namespace,
        "name": "gpukern",
        "version": 1,
        "license": re.search(
            r'^license = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
        )[1],
        "python-depends": [],
        "backend": about,
        "digest": {"algorithm": "sha256", "files": files},
    }


def _dotted(arch: str) -> str:
    """8.0 of 80, 9.0a of 90a."""
    return re.sub(r"(\d)(\D*)$", r".\1\2", arch)


def make(target: Path) -> list[Path]:
    """Returns the folders of the variants."""
    if not (BUILD / "CMakeCache.txt").exists():
        sys.exit(f"hub: {BUILD} is not configured; run make hub")
    configure()
    built = (BUILD / "hub_backend").read_text()  # cpu, or cu130 and the architectures
    return [make_variant(target, backend) for backend in dict.fromkeys((built, "cpu"))]


def make_variant(target: Path, backend: str) -> Path:
    name = backend.split(" ")[0]
    namespace = f"_gpukern_{name}_{digest_of_sources()}"
    plugin = build(namespace)
    variant = (
        target
        / "build"
        / f"torch-stable-abi210-{name}-{platform.machine()}-{platform.system().lower()}"
    )
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(
        PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__", "*.so", "__main__.py")
    )
    shutil.copy(plugin, variant / PLUGIN)
    library = variant / "_library.py"
    text, count = re.subn(
        r'^NAMESPACE = "gpukern"$',
        f'NAMESPACE = "{namespace}"',
        library.read_text(),
        flags=re.MULTILINE,
    )
    if count != 1:
        sys.exit(f"hub: {PACKAGE / '_library.py'} has no line that names the namespace")
    library.write_text(text)
    with open(variant / "__init__.py", "a") as init:
        init.write(EXPORTS)
    described = json.dumps(metadata(namespace, backend, variant), indent=2) + "\n"
    (variant / "metadata.json").write_text(described)
    return variant


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*make(Path(sys.argv[1])), sep="\n")
