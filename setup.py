"""A thin build_ext over CMake. Nothing here imports torch or asks for CUDA: CMake finds both.

Environment: GPUKERN_CUDA=auto|0|1, GPUKERN_CUDA_ARCHS="80;90a", GPUKERN_NAMESPACE, MAX_JOBS, CMAKE_ARGS, and
GPUKERN_BUILD_DIR (default build/ for an editable install, a temporary folder for a wheel).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def version() -> str:
    header = (ROOT / "csrc" / "gpukern.h").read_text()
    parts = ("MAJOR", "MINOR", "PATCH")
    return ".".join(re.search(rf"#define GK_VERSION_{p} (\d+)", header).group(1) for p in parts)


def program(name: str) -> str | None:
    """The path of a program of this interpreter's environment, activated or not, or of the machine."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


class CMakeBuild(build_ext):
    """Configures, builds and installs the plugin into the package: the source tree's when editable."""

    def run(self):
        in_tree = self.inplace or self.editable_mode
        build = Path(os.environ.get("GPUKERN_BUILD_DIR") or (ROOT / "build" if in_tree else self.build_temp))
        cmake = program("cmake")
        if not cmake:
            sys.exit("gpukern: cmake was not found; pip install cmake ninja (or apt-get install cmake ninja-build)")
        configure = [cmake, "-S", str(ROOT), "-B", str(build), "-DGPUKERN_BUILD_TORCH=ON"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        if program("ninja") and not (build / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={program('ninja')}"]
        for name in ("GPUKERN_CUDA", "GPUKERN_CUDA_ARCHS", "GPUKERN_NAMESPACE"):
            if name in os.environ:
                configure += [f"-D{name}={os.environ[name]}"]
        self.step("configure", configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        self.step("build", [cmake, "--build", str(build), "--target", "gpukern_torch", "-j", jobs])
        prefix = str(ROOT if in_tree else Path(self.build_lib).resolve())
        self.step("install", [cmake, "--install", str(build), "--component", "torch", "--prefix", prefix])

    def step(self, name, command):
        """Runs one command; when it fails, the last thing on the screen is one line that says what to do."""
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(result.stdout, end="", flush=True)
        if result.returncode:
            reason = re.search(r"^ +(gpukern: .*)$", result.stdout, re.MULTILINE)
            text = reason.group(1) if reason else f"gpukern: {name} failed, see above: {shlex.join(command)}"
            if " has no torch; " in text:
                text += (
                    ". If it has one, pip hides it from builds: pip install --no-build-isolation . (which wants "
                    "setuptools, cmake and ninja installed, too)"
                )
            sys.exit(text)

    def get_outputs(self):
        return [] if self.editable_mode else [os.path.join(self.build_lib, "torch_gpukern", "libgpukern_torch.so")]

    def get_output_mapping(self):
        return {}


class Wheel(bdist_wheel):
    """py3-none-<platform>: the plugin uses torch's stable ABI and none of Python's, so one wheel serves every Python."""

    def run(self):
        # modules that an earlier wheel had and this one no longer has must not come along
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    version=version(),
    ext_modules=[Extension("torch_gpukern.libgpukern_torch", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
    # setuptools' own scratch folder, beside CMake's files and not among them
    options={"build": {"build_base": "build/setuptools"}},
)
