# SPDX-License-Identifier: BSD-3-Clause
"""The fields of a request's body. Fields that no code asks for are refused by name."""

from __future__ import annotations

import json
from typing import Any

from .request import Refused, shown


class Fields:
    """A field that is null counts as absent."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise Refused("body", f"the body is {shown(body)}; expected an object")
        for name, value in body.items():
            refuse_surrogates(name, value)
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        x = self.take(name, default)
        if not isinstance(x, bool):
            raise Refused(name, f"{name} is {shown(x)}; expected true or false")
        return x

    def text(self, name: str) -> str | None:
        x = self.take(name)
        if x is not None and not isinstance(x, str):
            raise Refused(name, f"{name} is {shown(x)}; expected a string")
        return x

    def only(self, name: str, *served: Any) -> None:
        """A field that asks for nothing with these values. It is refused with others."""
        x = self.take(name)
        if x is not None and not any(type(x) is type(s) and x == s for s in served):
            raise Refused(name, f"{name} is {shown(x)}; only {served[0]!r} is served")

    def done(self) -> None:
        for name in self.left:
            raise Refused(name, f"{shown(name)} is not known here")


def refuse_surrogates(name: str, value: object) -> None:
    """JSON may hold half of a UTF-16 pair ("\\ud800"). It is no character, and has no bytes."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = error.object[error.start]
        where = name if name.isprintable() else None
        raise Refused(
            where, f"{shown(name)} has a lone surrogate, {lone!r}, which is no character"
        ) from None
