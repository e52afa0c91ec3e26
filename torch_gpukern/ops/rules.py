# SPDX-License-Identifier: BSD-3-Clause
"""Rules: the arguments of an attention call by name, and their defaults from the schemas.

Names, defaults and types come from the table GK_ATTENTION (ops/rules.h) through the schemas. Public
functions spell the arguments out for their readers. All other code takes and passes on `**rules`,
and names only the arguments that it reads.
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
    """Decorates a function that states what the ops `names` compute. The result takes the ops'
    arguments by position or keyword. The function gets all arguments that have a default, as
    `**rules`.
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
