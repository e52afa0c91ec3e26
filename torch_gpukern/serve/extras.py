# SPDX-License-Identifier: BSD-3-Clause
"""The packages of the extra `gpukern[serve]`: a missing one is named, with the line that installs
it."""

from __future__ import annotations

import importlib
from types import ModuleType

# the module that is imported, and the package that has it
HTTP = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}
MODELS = {"transformers": "transformers"}
CHAT = {"jinja2": "jinja2"}


def need(packages: dict[str, str]) -> list[ModuleType]:
    """The modules, imported.

    Raises:
        RuntimeError: one or more of them are not installed.
    """
    found, missing = [], []
    for module, package in packages.items():
        try:
            found.append(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            missing.append(package)
    if missing:
        raise RuntimeError(
            f"serve needs {' and '.join(missing)}, which is not installed: "
            f"pip install 'gpukern[serve]' installs all that serving needs"
        )
    return found
