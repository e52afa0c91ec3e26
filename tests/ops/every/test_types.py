# SPDX-License-Identifier: BSD-3-Clause
"""A type checker's verdict on the public functions: the package is typed (PEP 561)."""

import os
import subprocess
import sys
import typing

import pytest
import torch
from conftest import torch_gpukern

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

GOOD = """
from typing import Literal, assert_type
import torch
from torch import Tensor
import torch_gpukern as gk

def calls(x: Tensor, i: Tensor, flag: bool) -> None:
    assert_type(gk.flash_attn(x, x, x), Tensor)
    assert_type(gk.flash_attn(x, x, x, return_lse=False), Tensor)
    assert_type(gk.flash_attn(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(gk.flash_attn(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(gk.flash_attn_varlen(x, x, x, i, i, 1, 1), Tensor)
    assert_type(gk.flash_attn_varlen(x, x, x, i, i, 1, 1, return_lse=True), tuple[Tensor, Tensor])
    assert_type(gk.flash_attn_varlen(x, x, x, i, i, 1, 1, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(gk.paged_attn(x, x, x, i, i), Tensor)
    assert_type(gk.paged_attn(x, x, x, i, i, return_lse=True), tuple[Tensor, Tensor])
    assert_type(gk.paged_attn(x, x, x, i, i, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(gk.gemm(x, x, activation="gelu_tanh", fp32_precision="tf32"), Tensor)
    plan = gk.explain("gemm", x, x, activation="silu")
    assert_type(plan, gk.Explanation)
    assert_type(plan["instance"], str)
    assert_type(plan["tile"], list[int])
    assert_type(plan["bound_us"], float)
    assert_type(plan["class"], str)
"""
BAD = {
    'gk.gemm(x, x, activation="swish")': "arg-type",
    'gk.gemm(x, x, fp32_precision="bf16")': "arg-type",
    'gk.explain("attn_merge", x)': "arg-type",
    'gk.explain("gemm", x, x)["kernel"]': "typeddict-item",
    "gk.flash_attn(x, x, x, return_lse=1.5)": "call-overload",
}
# A torch of a few lines, and nothing of other packages: a checker reads the real ones for half a
# minute.
CONFIGURATION = """[mypy]
python_version = 3.12
follow_imports = skip
[mypy-torch_gpukern,torch_gpukern.*]
follow_imports = silent
[mypy-numpy.*,torch._C.*]
follow_imports_for_stubs = True
"""
TORCH = {
    "torch/__init__.pyi": "from typing import Any\nclass Tensor: ...\nclass dtype: ...\nclass "
    "device: ...\n"
    "def __getattr__(name: str) -> Any: ...\n",
    "torch/autograd/__init__.pyi": "from typing import Any\ndef __getattr__(name: str) -> Any: "
    "...\n",
    "torch/autograd/graph.pyi": "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n",
    "torch/utils/__init__.pyi": "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n",
}


def test_types_that_a_checker_sees(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    for name, text in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    lines = [f"def bad{i}(x: Tensor) -> None: {call}" for i, call in enumerate(BAD)]
    (tmp_path / "probe.py").write_text(GOOD + "\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "probe.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    found = {
        line.split("error: ")[0] + line.rsplit("[", 1)[-1]
        for line in done.stdout.splitlines()
        if "error: " in line
    }
    first = GOOD.count("\n") + 1
    assert found == {f"probe.py:{first + i}: {code}]" for i, code in enumerate(BAD.values())}, (
        done.stdout + done.stderr
    )


def test_literals_are_what_the_ops_take():
    from torch_gpukern.ops.gemm import Activation, Precision

    a = torch.ones(2, 2)
    for activation in typing.get_args(Activation):
        for precision in typing.get_args(Precision):
            torch_gpukern.gemm(a, a, activation=activation, fp32_precision=precision)
    assert set(typing.get_args(Activation)) == set(torch_gpukern.reference.ACTIVATIONS)


def test_an_explanation_has_the_entries_of_its_type(device):
    """And no other; device, class and rows on CUDA alone, accumulate of 8-bit attention alone."""
    a = torch.ones(8, 8, device=device)
    q = torch.ones(1, 1, 8, 8, device=device)
    always = torch_gpukern.Explanation.__required_keys__
    assert set(torch_gpukern.explain("flash_attn", q, q, q)) == always
    more = (
        torch_gpukern.Explanation.__optional_keys__ - {"accumulate"} if device == "cuda" else set()
    )
    codes = q.to(torch.float8_e4m3fn)
    assert set(torch_gpukern.explain("flash_attn", codes, codes, codes)) == always | {"accumulate"}
    plan = torch_gpukern.explain("gemm", a, a)
    assert set(plan) == always | more
    kinds = {
        name: kind
        for name, kind in typing.get_type_hints(torch_gpukern.Explanation).items()
        if name in plan
    }
    for name, kind in kinds.items():
        expected = {float: (int, float), int: int}.get(kind, typing.get_origin(kind) or kind)
        assert isinstance(plan[name], expected), name
