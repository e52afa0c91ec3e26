# SPDX-License-Identifier: BSD-3-Clause
"""Prints the signatures of vLLM that torch_gpukern.integrations.vllm relies on, as JSON.

python tests/integrations/vllm_signatures.py vllm-0.33.0-*.whl > tests/data/vllm_signatures.json

It parses the wheel and imports nothing of it. tests/integrations/test_integrations_vllm.py compares
the plugin with the file.
"""

import ast
import json
import sys
import zipfile

# The parts of each module that the plugin uses; classes are listed with all methods and fields.
WANTED = {
    "vllm/v1/attention/backend.py": (
        "AttentionBackend",
        "AttentionImplBase",
        "AttentionImpl",
        "MLAAttentionImpl",
        "AttentionMetadata",
        "AttentionMetadataBuilder",
        "AttentionType",
        "AttentionCGSupport",
        "CommonAttentionMetadata",
        "MultipleOf",
    ),
    "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum",),
    "vllm/model_executor/layers/attention/mla_attention.py": (
        "QueryLenSupport",
        "MLACommonBackend",
        "MLACommonDecodeMetadata",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "MLACommonBaseImpl",
        "MLACommonImpl",
    ),
}
METHODS_OF = {"AttentionBackendEnum": ("register", "get_class", "get_path")}
# Names of earlier versions that are nowhere in this one's Python: those of drafts that form a tree.
ABSENT = ("TREE_ATTN", "speculative_token_tree")


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names in order, with '=' and the default if there is one."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [
        arg.arg + (f"={ast.unparse(default)}" if default else "")
        for arg, default in zip(positional, defaults)
    ]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        found.append(f"*{arg.arg}" + (f"={ast.unparse(default)}" if default else ""))
    return found


def signature(function: ast.FunctionDef) -> dict:
    marks = {
        decorator.id for decorator in function.decorator_list if isinstance(decorator, ast.Name)
    }
    kind = next(
        (mark for mark in ("staticmethod", "classmethod", "property") if mark in marks), "method"
    )
    return {"kind": kind, "abstract": "abstractmethod" in marks, "parameters": parameters(function)}


def described(node: ast.ClassDef) -> dict:
    kept = METHODS_OF.get(node.name)
    methods, fields = {}, {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (kept is None or item.name in kept):
            if not item.name.startswith("__") or item.name == "__init__":
                methods[item.name] = signature(item)
        elif isinstance(item, ast.AnnAssign) and kept is None:
            fields[item.target.id] = ast.unparse(item.value) if item.value else None
        elif isinstance(item, ast.Assign) and kept is None:
            fields[item.targets[0].id] = ast.unparse(item.value)
    bases = [ast.unparse(base).split("[")[0] for base in node.bases]
    return {"bases": bases, "fields": fields, "methods": methods}


def main() -> None:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        version = next(
            x.split(": ")[1]
            for x in wheel.read(metadata).decode().splitlines()
            if x.startswith("Version: ")
        )
        classes = {}
        for module, names in WANTED.items():
            for node in ast.parse(wheel.read(module)).body:
                if isinstance(node, ast.ClassDef) and node.name in names:
                    classes[node.name] = {
                        "module": module[:-3].replace("/", "."),
                        **described(node),
                    }
        python = [x for x in wheel.namelist() if x.startswith("vllm/") and x.endswith(".py")]
        text = b"\n".join(map(wheel.read, python)).decode()
    there = [name for name in ABSENT if name in text]
    if there:
        sys.exit(f"vllm_signatures: {version} has {', '.join(there)}")
    missing = [name for names in WANTED.values() for name in names if name not in classes]
    if missing:
        sys.exit(f"vllm_signatures: {version} has no {', '.join(missing)}")
    print(text_of({"version": version, "absent": ABSENT, "classes": classes}, 4))


def text_of(value: object, levels: int, indent: str = "\n") -> str:
    """JSON with a line for each member of the outer `levels` dictionaries."""
    if not isinstance(value, dict) or not value or levels == 0:
        return json.dumps(value)
    inner = indent + " "
    members = (f"{inner}{json.dumps(k)}: {text_of(v, levels - 1, inner)}" for k, v in value.items())
    return f"{{{','.join(members)}{indent}}}"


if __name__ == "__main__":
    main()
