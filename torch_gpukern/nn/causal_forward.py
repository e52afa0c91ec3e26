# SPDX-License-Identifier: BSD-3-Clause
"""Reads the forward of a transformers causal model: which module gives the hidden states, which is
the head, and what happens to the logits before the loss. causal_lm.py calls `plan_of`.

`_Reader` runs the forward's source with symbols (`_Symbol`) instead of tensors. It assumes what
holds whenever the fused loss runs: labels are given, all logits are wanted, the result is not a
tuple, and no loss of routers is asked for. So it does not matter how a release of transformers
writes a step. For example, a slice that keeps all tokens is the hidden states, whether an
expression or a function takes the slice. If an expression is none of the symbols below, or changes
one in a way that the fused loss cannot express, the model keeps its own loss. The reason names the
statement.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

__all__ = ["Plan", "plan_of"]


class Plan(NamedTuple):
    """The parts of a model's forward."""

    base: str  # the module that gives the hidden states, by its dotted name
    positional: tuple[str, ...]  # arguments of the forward that the base gets by position
    named: tuple[str, ...]  # arguments of the forward that the base gets by name
    rest: bool  # whether the base also gets the forward's **kwargs
    head: str  # the attribute that is the head
    casts: bool  # whether the hidden states are cast to the dtype of the head's weight
    # what happens to logits before the loss: from a model to arguments of linear_cross_entropy
    rules: tuple[Callable[[Any], dict[str, float]], ...]
    loss_named: tuple[str, ...]  # the names that the forward takes from **kwargs for the loss
    loss_rest: bool  # whether the loss gets all of the forward's **kwargs
    routers: bool  # whether output_router_logits adds a loss
    result: type
    fields: tuple[str, ...]  # fields that the result copies from the base's result, by name


class _Symbol(NamedTuple):
    """What an expression stands for. `what` depends on the kind:

    argument  an argument of the forward, unchanged: its name
    rest      the forward's **kwargs
    of_rest   an entry of **kwargs, by kwargs.get: its name
    labels    the labels
    keep      logits_to_keep, which is assumed to be 0
    whole     a slice that keeps all tokens
    self      an attribute of the model: its dotted name, "" for the model
    outputs   the result of the base model
    field     a field of that result: its name
    hidden    the hidden states: the attribute whose dtype they were cast to, such as
              "lm_head.weight.dtype", or ""
    logits    the logits: a tuple of the changes since the head, each ("times", attribute),
              ("over", attribute) or ("tanh", "")
    loss      the loss
    None      None
    """

    kind: str
    what: Any = None


class _Other(Exception):
    """An expression or a statement that the fused loss cannot express."""


@functools.cache
def plan_of(kind: type) -> tuple[Plan | None, str]:
    """(the plan of a class's forward, ""), or None and why there is none."""
    forward = inspect.unwrap(kind.forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None, "the source of its forward cannot be read"
    reader = _Reader(forward)
    try:
        reader.run(tree.body[0].body)  # type: ignore[attr-defined]
    except _Other as other:
        return None, f"its forward does more than the head and the loss: {other}"
    if not {"base", "head", "result"} <= reader.found.keys():
        return None, "its forward is no base model, head and loss"
    return Plan(**reader.found), ""


class _Reader:
    """Runs a forward with symbols. `names` holds its variables, and `found` the fields of a Plan
    that have been found so far."""

    def __init__(self, forward: Any) -> None:
        self.globals = forward.__globals__
        self.found: dict[str, Any] = {"routers": False}
        self.names: dict[str, _Symbol] = {}
        for name, parameter in inspect.signature(forward).parameters.items():
            kind = "rest" if parameter.kind is parameter.VAR_KEYWORD else "argument"
            self.names[name] = _Symbol(kind, name)
        self.names |= {
            "self": _Symbol("self", ""),
            "labels": _Symbol("labels"),
            "logits_to_keep": _Symbol("keep"),
        }

    # ---- statements ------------------------------------------------------------------------------

    def run(self, statements: list[ast.stmt]) -> bool:
        """Runs a block. True if one of its statements returned."""
        for statement in statements:
            try:
                if self._run_statement(statement):
                    return True
            except _Other as other:  # a text means that an inner statement is named already
                raise other if str(other) else _Other(_first(statement)) from None
        return False

    def _run_statement(self, statement: ast.stmt) -> bool:
        """True if the statement returned."""
        match statement:
            case ast.Expr(value=ast.Constant()):
                return False
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self.value(value)
                return False
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.names[name] = self.value(value)
                return False
            case ast.If(test=test, body=body, orelse=orelse):
                holds = self.truth(test)
                if holds is not None:
                    return self.run(body if holds else orelse)
                self._run_undecided(test, body, orelse)
                return False
            case ast.Return(value=ast.Call() as call):
                self._result(call)
                return True
        raise _Other

    def _run_undecided(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Runs an if statement that the assumptions do not decide. Its branches may change nothing,
        with one exception: `if softcap is not None` may apply this softcap to the logits."""
        if any(isinstance(node, (ast.Call, ast.Await, ast.NamedExpr)) for node in ast.walk(test)):
            raise _Other
        before, found = dict(self.names), dict(self.found)
        if self.run(body):
            raise _Other
        changed = {name for name, symbol in self.names.items() if before.get(name) != symbol}
        if changed:
            optional = self._tested(test)
            for name in changed:
                was, now = before.get(name), self.names[name]
                if was is None or was.kind != "logits" or orelse or optional is None:
                    raise _Other
                if now != _Symbol("logits", (*was.what, *_softcap(optional))):
                    raise _Other
        elif self.run(orelse) or before != self.names:
            raise _Other
        if found != self.found:
            raise _Other

    def _tested(self, test: ast.expr) -> str | None:
        """For a test `attribute is not None`, the attribute of the model; otherwise None."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                symbol = self.value(left)
                return symbol.what if symbol.kind == "self" else None
        return None

    def _result(self, call: ast.Call) -> None:
        """Notes the class that is returned. Its fields must be loss, logits, and fields of the
        base's result under the same names."""
        if not isinstance(call.func, ast.Name) or call.args:
            raise _Other
        given = {str(field.arg): self.value(field.value) for field in call.keywords}
        logits = given.pop("logits", _Symbol("None"))
        if given.pop("loss", None) != _Symbol("loss") or logits.kind != "logits":
            raise _Other
        fields = []
        for name, symbol in given.items():
            if symbol in (_Symbol("field", name), _Symbol("hidden", "")):
                if symbol.kind == "hidden" and name != "last_hidden_state":
                    raise _Other
                fields.append(name)
            elif symbol != _Symbol("None"):
                raise _Other
        self.found |= {"result": self.globals[call.func.id], "fields": tuple(fields)}

    # ---- conditions ------------------------------------------------------------------------------

    def truth(self, test: ast.expr) -> bool | None:
        """Whether a condition holds under the assumptions; None if they do not decide it."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                holds = self.truth(operand)
                return None if holds is None else not holds
            case ast.Compare(
                left=left,
                ops=[ast.Is() | ast.IsNot() as op],
                comparators=[ast.Constant(value=None)],
            ):
                kind = self.value(left).kind
                if kind in ("argument", "of_rest", "self", "field", "rest"):
                    return None
                return (kind == "None") is isinstance(op, ast.Is)
            case ast.Call(func=ast.Name(id="isinstance"), args=[of, ast.Name(id="int")]):
                return True if self.value(of).kind == "keep" else None
            case ast.Name(id="output_router_logits" as name):
                if self.names.get(name) == _Symbol("argument", name):
                    self.found["routers"] = True
                    return False
            case ast.Name(id="return_dict" as name):
                return True if self.names.get(name) == _Symbol("argument", name) else None
        return None

    # ---- expressions -----------------------------------------------------------------------------

    def value(self, expression: ast.expr) -> _Symbol:
        match expression:
            case ast.Constant(value=None):
                return _Symbol("None")
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self.value(value), name)
            case ast.Subscript(value=value, slice=index):
                return self._subscript(self.value(value), index)
            case ast.IfExp():
                return self._conditional(expression)
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
                of, by = self.value(left), self.value(right)
                if of.kind == "logits" and by.kind == "self":
                    change = "times" if isinstance(op, ast.Mult) else "over"
                    return _Symbol("logits", (*of.what, (change, by.what)))
            case ast.Call():
                return self._call(expression)
        raise _Other

    def _attribute(self, of: _Symbol, name: str) -> _Symbol:
        if of.kind == "self":
            return _Symbol("self", f"{of.what}.{name}".removeprefix("."))
        if of.kind == "outputs":
            return _Symbol("hidden", "") if name == "last_hidden_state" else _Symbol("field", name)
        raise _Other

    def _subscript(self, of: _Symbol, index: ast.expr) -> _Symbol:
        if of.kind == "outputs" and isinstance(index, ast.Constant) and index.value == 0:
            return _Symbol("hidden", "")
        if of.kind == "hidden" and isinstance(index, ast.Tuple):
            if all(self._is_whole(part) for part in index.elts):
                return of
        raise _Other

    def _is_whole(self, index: ast.expr) -> bool:
        if isinstance(index, ast.Slice):
            return index.lower is None and index.upper is None and index.step is None
        return self.value(index).kind == "whole"

    def _conditional(self, expression: ast.IfExp) -> _Symbol:
        holds = self.truth(expression.test)
        if holds is not None:
            return self.value(expression.body if holds else expression.orelse)
        # `x if x is not None else self.config.x`, for return_dict and output_*: the base model
        # replaces None in the same way, so the result is the argument
        argument = self.value(expression.body)
        name = str(argument.what)
        default = _Symbol("self", f"config.{name}")
        if (
            argument.kind == "argument"
            and (name == "return_dict" or name.startswith("output_"))
            and ast.unparse(expression.test) == f"{name} is not None"
            and self.value(expression.orelse) == default
        ):
            return argument
        raise _Other

    def _call(self, call: ast.Call) -> _Symbol:
        match call.func:
            case ast.Name(id="slice"):
                return self._slice(call)
            case ast.Name(id="slice_logits_to_keep") if len(call.args) == 2 and not call.keywords:
                hidden, keep = (self.value(x) for x in call.args)
                if hidden.kind == "hidden" and keep.kind == "keep":
                    return hidden
                raise _Other
            case ast.Attribute(attr="tanh") if self._is_tanh(call.func):
                of = self.value(call.args[0]) if len(call.args) == 1 else _Symbol("None")
                if of.kind == "logits" and not call.keywords:
                    return _Symbol("logits", (*of.what, ("tanh", "")))
                raise _Other
            case ast.Attribute(value=value, attr=name):
                of = self.value(value)
                return (
                    self._call_of_self(call) if of.kind == "self" else self._method(of, name, call)
                )
        raise _Other

    def _is_tanh(self, function: ast.expr) -> bool:
        """Whether a dotted name is torch's tanh."""
        module, _, path = ast.unparse(function).partition(".")
        if module not in self.globals or module in self.names:
            return False
        try:
            found = attrgetter(path)(self.globals[module])
        except AttributeError:
            return False
        return found in (torch.tanh, torch.nn.functional.tanh)

    def _slice(self, call: ast.Call) -> _Symbol:
        """slice(-logits_to_keep, None), which keeps all tokens since logits_to_keep is 0."""
        match call.args:
            case [ast.UnaryOp(op=ast.USub(), operand=first), ast.Constant(value=None)]:
                if self.value(first).kind == "keep" and not call.keywords:
                    return _Symbol("whole")
        raise _Other

    def _method(self, of: _Symbol, name: str, call: ast.Call) -> _Symbol:
        """Methods of tensors that do not change the loss, casts of the hidden states, and
        kwargs.get."""
        if of.kind == "logits" and name in ("float", "contiguous") and not call.args:
            return of
        if of.kind == "labels" and name == "to":
            return of
        if of.kind == "hidden" and name == "to":
            given = [*call.args, *(k.value for k in call.keywords if k.arg == "dtype")]
            if len(given) == 1 and len(call.args) + len(call.keywords) == 1:
                dtype = self.value(given[0])
                if dtype.kind == "self" and dtype.what.endswith(".weight.dtype"):
                    return _Symbol("hidden", dtype.what)
        if of.kind == "rest" and name == "get" and len(call.args) == 1:
            if isinstance(call.args[0], ast.Constant):
                return _Symbol("of_rest", call.args[0].value)
        raise _Other

    def _call_of_self(self, call: ast.Call) -> _Symbol:
        """The base model, the head, or the loss function."""
        name = self.value(call.func).what
        if name == "loss_function":
            return self._loss(call)
        if "base" not in self.found:
            return self._base(name, call)
        if "head" not in self.found and "." not in name and len(call.args) == 1:
            hidden = self.value(call.args[0])
            if hidden.kind == "hidden" and hidden.what in ("", f"{name}.weight.dtype"):
                if not call.keywords:
                    self.found |= {"head": name, "casts": hidden.what != ""}
                    return _Symbol("logits", ())
        raise _Other

    def _base(self, name: str, call: ast.Call) -> _Symbol:
        """The call of the base model. Each of its arguments must be an argument of the forward
        with the same name."""
        positional = [self._same(argument) for argument in call.args]
        named = [self._same(k.value, k.arg) for k in call.keywords if k.arg is not None]
        rest = [self.value(k.value).kind for k in call.keywords if k.arg is None]
        if any(kind != "rest" for kind in rest):
            raise _Other
        self.found |= {
            "base": name,
            "positional": tuple(positional),
            "named": tuple(named),
            "rest": bool(rest),
        }
        return _Symbol("outputs")

    def _same(self, value: ast.expr, name: str | None = None) -> str:
        """The name of the forward's argument that `value` is; it must be `name` if that is given."""
        symbol = self.value(value)
        own = "logits_to_keep" if symbol.kind == "keep" else symbol.what
        if symbol.kind not in ("argument", "keep") or (name or own) != own:
            raise _Other
        return own

    def _loss(self, call: ast.Call) -> _Symbol:
        """The call of the loss function, with logits, labels and the size of the vocabulary."""
        given = dict(zip(("logits", "labels", "vocab_size"), call.args))
        named = {k.arg: k.value for k in call.keywords if k.arg is not None}
        rest = [self.value(k.value).kind for k in call.keywords if k.arg is None]
        if len(call.args) > 3 or named.keys() & given.keys() or any(k != "rest" for k in rest):
            raise _Other
        given |= named
        of = [self.value(given.pop(name, ast.Constant(None))) for name in ("logits", "labels")]
        if of[0].kind != "logits" or of[1].kind != "labels":
            raise _Other
        vocab = ast.unparse(given.pop("vocab_size", ast.Constant(None)))
        if not vocab.startswith("self."):
            raise _Other
        given.pop("pad_token_id", None)  # ForCausalLMLoss does not read it
        loss_named = []
        for name, value in given.items():
            if self.value(value) != _Symbol("of_rest", name):
                raise _Other
            loss_named.append(name)
        self.found |= {
            "rules": _rules(of[0].what),
            "loss_named": tuple(loss_named),
            "loss_rest": bool(rest),
        }
        return _Symbol("loss")


def _softcap(attribute: str) -> tuple[tuple[str, str], ...]:
    """The changes of the logits by a softcap."""
    return ("over", attribute), ("tanh", ""), ("times", attribute)


def _rules(changes: tuple[tuple[str, str], ...]) -> tuple[Callable[[Any], dict[str, float]], ...]:
    """The changes of the logits as arguments of `linear_cross_entropy`: at most one scale, then at
    most one softcap."""
    rules: list[Callable[[Any], dict[str, float]]] = []
    if len(changes) >= 3 and changes[-3:] == _softcap(changes[-1][1]):
        attribute = changes[-1][1]
        rules.append(lambda model: {"softcap": _number(model, attribute, none=0.0)})
        changes = changes[:-3]
    match changes:
        case ():
            pass
        case (("times", scale),):
            rules.append(lambda model: {"logit_scale": _number(model, scale)})
        case (("over", scale),):
            rules.append(lambda model: {"logit_scale": 1.0 / _number(model, scale)})
        case _:
            raise _Other
    return tuple(rules)


def _number(model: Any, attribute: str, none: float | None = None) -> float:
    """The value of a model's attribute; `none` is the value of an attribute that is None."""
    found = attrgetter(attribute)(model)
    found = none if found is None else found
    if not isinstance(found, (int, float)):
        raise TypeError(f"its {attribute} is no number")
    return float(found)


def _first(statement: ast.stmt) -> str:
    """The beginning of a statement, to name it."""
    return ast.unparse(statement).partition("\n")[0][:60]
