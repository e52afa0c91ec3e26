# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of attention: the table (ops/rules.h), the schemas that it gives, and the public
functions, which spell them out."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from conftest import ops, reference, torch_gpukern

from torch_gpukern.ops import rules
from torch_gpukern.ops.op import Op

ROOT = Path(__file__).resolve().parents[3]
# A public function, and the ops that its arguments are of.
PUBLIC = {
    "flash_attn": ("flash_attn", "flash_attn_fp8"),
    "flash_attn_varlen": ("flash_attn_varlen", "flash_attn_varlen_fp8"),
    "paged_attn": ("paged_attn",),
}
# Arguments of a function that an op takes in another form: an AttnMask is several, a SharedPrefix
# and a mask over new tokens make two calls.
OWN = {"flash_attn": {"attn_mask", "bias", "distance_bias"}, "paged_attn": {"prefix", "attn_mask"}}
TYPES = {
    "float": "float",
    "int": "int",
    "SymInt": "int",
    "bool": "bool",
    "str": "Literal",
    "Optional[Tensor]": "Tensor | None",
    "Optional[float]": "float | None",
    "Optional[ScalarType]": "torch.dtype | None",
}


def parameters(function):
    return {
        p.name: p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_has_the_tables_arguments(name):
    """Names, defaults and types; beside them return_lse."""
    given = parameters(getattr(torch_gpukern, name))
    assert given.pop("return_lse").default is False
    given = {n: p for n, p in given.items() if n not in OWN.get(name, ())}
    assert {n: p.default for n, p in given.items()} == rules.defaults_of(*PUBLIC[name])
    schema = {
        a.name: str(a.real_type)
        for op in PUBLIC[name]
        for a in getattr(ops, op).default._schema.arguments
    }
    for n, p in given.items():
        text = (
            str(p.annotation)
            .removeprefix("<class '")
            .removesuffix("'>")
            .replace("torch.Tensor", "Tensor")
        )
        assert text.removeprefix("typing.").startswith(TYPES[schema[n]]), n


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_hands_on_each_argument(name, monkeypatch):
    """By name and place: each is a value of its own, which arrives where the schema has it."""
    met = []
    monkeypatch.setattr(Op, "call", lambda self, *args: met.append(self.named(args)))
    public = getattr(torch_gpukern, name)
    for op in PUBLIC[name]:
        coded = op.endswith("_fp8")
        tensor = torch.empty(1, dtype=torch.float8_e4m3fn if coded else torch.float32)
        schema = getattr(ops, op).default._schema.arguments
        call = {a.name: tensor if i == 0 else object() for i, a in enumerate(schema)}
        of_codes = {
            n
            for n in call
            if n not in {a.name for a in getattr(ops, name).default._schema.arguments}
        }
        public(**{n: x for n, x in call.items() if coded or n not in of_codes})
        assert met.pop() == call


def test_reference_takes_the_same():
    for name, of in PUBLIC.items():
        taken = inspect.signature(getattr(reference, name)).parameters
        given = {
            n: p.default
            for n, p in taken.items()
            if n not in {"return_lse", "kept"} | OWN.get(name, set()) and p.default is not p.empty
        }
        assert given == rules.defaults_of(*of)
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(TypeError, match="no_such"):
        reference.flash_attn(q, q, q, no_such=1)


@pytest.mark.parametrize(
    "forward",
    ["flash_attn", "flash_attn_masked", "flash_attn_varlen", "cp_attn_fwd", "cp_attn_varlen_fwd"],
)
def test_a_backward_takes_what_its_forward_took(forward):
    taken = rules.defaults_of(f"{forward.removesuffix('_fwd')}_bwd")
    given = rules.defaults_of(forward)
    given.pop("out_dtype", None)  # backward_of has seen to it
    assert given.items() <= taken.items()


def test_no_schema_is_written_in_python():
    for path in (ROOT / "torch_gpukern").rglob("*.py"):
        calls = (
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        )
        assert not any(
            isinstance(f, ast.Attribute)
            and f.attr == "define"
            and ast.unparse(f) == "library.define"
            for f in calls
        ), path
