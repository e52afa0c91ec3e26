# SPDX-License-Identifier: BSD-3-Clause
"""Writes the .pyi of a module whose functions take return_lse. Its value decides whether a function
returns a tensor or a pair, which a single signature cannot express.

    python cmake/stubs.py torch_gpukern/ops/flash_attn.py build/stubs/flash_attn.pyi

The stub has the signature of each public function of the module, without defaults. A function with
return_lse gets three overloads: for False, for True, and for a bool of unknown value. The build runs
this script, so a signature is written once, in the module.
"""

import ast
import sys
from pathlib import Path

PAIR = "Tensor | tuple[Tensor, Tensor]"
# the type of return_lse in an overload -> (whether the argument is optional, the result's type)
BY_RETURN_LSE = {
    "Literal[False]": (True, "Tensor"),
    "Literal[True]": (False, "tuple[Tensor, Tensor]"),
    "bool": (True, PAIR),
}


def argument(a: ast.arg, default: ast.expr | None) -> str:
    """A line of a signature."""
    quoted = isinstance(a.annotation, ast.Constant)  # a type that is imported for annotations only
    annotation = a.annotation.value if quoted else ast.unparse(a.annotation)
    return f"    {a.arg}: {annotation}{'' if default is None else ' = ...'},\n"


def stub(function: ast.FunctionDef, return_lse: str = "") -> str:
    """The function's signature. return_lse: the type of that argument in this overload."""
    optional, result = BY_RETURN_LSE.get(return_lse, (True, ast.unparse(function.returns)))
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults
    text = "".join(map(argument, args.args, defaults))
    if args.kwonlyargs:
        text += "    *,\n"
    for a, default in zip(args.kwonlyargs, args.kw_defaults):
        if return_lse and a.arg == "return_lse":
            text += f"    return_lse: {return_lse}{' = ...' if optional else ''},\n"
        else:
            text += argument(a, default)
    head = "@overload\n" if return_lse else ""
    return f"{head}def {function.name}(\n{text}) -> {result}: ...\n"


def imports(tree: ast.Module, text: str) -> str:
    """The imports of the module that bind names of `text`."""
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - {
        "Literal",
        "overload",
    }
    kept = ast.parse("from typing import Literal, overload").body
    checking = [
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for node in sum(checking, tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [x for x in node.names if (x.asname or x.name) in used]
            kept += [node] if node.names else []
    return "".join(f"{ast.unparse(node)}\n" for node in kept)


def stubs(module: str, name: str) -> str:
    tree = ast.parse(module)
    functions = [
        x for x in tree.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")
    ]
    text = ""
    for function in functions:
        overloaded = any(a.arg == "return_lse" for a in function.args.kwonlyargs)
        text += (
            "".join(stub(function, kind) for kind in BY_RETURN_LSE)
            if overloaded
            else stub(function)
        )
    made = (
        f'"""Types of {name} by the value of return_lse, from {name}.py by cmake/stubs.py."""\n\n'
    )
    return f"# SPDX-License-Identifier: BSD-3-Clause\n{made}{imports(tree, text)}\n{text}"


if __name__ == "__main__":
    source, to = map(Path, sys.argv[1:])
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(stubs(source.read_text(), source.stem))
