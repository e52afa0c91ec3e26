# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of attention in Python: Rules, a call's by name, with what the schemas say of them.

Names, defaults and types come from the table GK_ATTENTION (ops/rules.h) through the schemas. Public
functions spell them out, because that is what users read. All other code takes and hands on
`**rules`, and names what it reads.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._library import ops

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Rules", "defaults_of", "states"]


class Rules(dict):
    """Arguments of an attention call by name, read as attributes: ``rules.softcap``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def but(self, **changes: Any) -> "Self":
        """The same rules with some of them changed."""
        return type(self)(self | changes)


@functools.cache
def defaults_of(*names: str) -> dict[str, Any]:
    """The arguments of these ops that have a default, and the defaults."""
    arguments = [a for name in names for a in getattr(ops, name).default._schema.arguments]
    return {a.name: a.default_value for a in arguments if a.has_default_value()}


def states(*names: str) -> Callable:
    """A function that states what the ops `names` compute: it takes their arguments, by place or
    keyword, and gets those that have a default as `**rules`, all of them.
    """

    def decorate(statement: Callable) -> Callable:
        parameters = [
            p
            for p in inspect.signature(statement).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        here = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [p.replace(kind=here) for p in parameters]
        rules = [
            inspect.Parameter(name, here, default=x) for name, x in defaults_of(*names).items()
        ]
        required = [p for p in own if p.default is p.empty]
        signature = inspect.Signature([*required, *rules, *own[len(required) :]])

        @functools.wraps(statement)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return statement(**bound.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
