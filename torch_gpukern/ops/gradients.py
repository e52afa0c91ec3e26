# SPDX-License-Identifier: BSD-3-Clause
"""The autograd.Functions of an op, made from its declaration in define_op: one for eager calls, one
for torch.func's transforms."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.autograd import Function

from .._library import (
    NAMESPACE,
    any_autocast,
    below_autocast,
    has_torch_function,
    is_grad_enabled,
    traced,
)
from .op import Op


def no_forward_mode(op: Op) -> str:
    return (
        f"{op.said}: it has no forward-mode derivative (torch.func.jvp, "
        f"torch.autograd.forward_ad); "
        "use reverse mode (torch.autograd.grad)"
    )


def differentiate(
    variant: Op,
    op: Op,
    backward: Callable,
    save: Callable | None,
    saved: Sequence[str],
    reads_all: Callable | None,
    without_gradient: Sequence[str],
) -> None:
    """Sets `differentiate` and `transformed` of `variant`, which is op or op.all. The other
    arguments are those of define_op."""
    rules = _Rules(op.all, backward, save, saved, without_gradient)
    first = variant is not op.all
    fast = of_all = _fast(rules, first and reads_all is None, op.all.below)
    if reads_all is not None:
        # Backward reads a tensor that the Function returns and the call does not. As a result of
        # the Function it has a history for second derivatives.
        of_first = _fast_of_first(rules, op.below)

        def fast(*args):
            return of_all(*args)[0] if reads_all(args) else of_first(*args)

    slow = _with_setup_context(variant, rules)

    def transformed(*args):
        results = slow.apply(*args)
        return results[0] if first else results

    variant.differentiate, variant.transformed = fast, transformed


class _Rules:
    """Selects by name what forward keeps, and calls backward with it.

    Forward must be fast. So the constructor finds the positions of all arguments once, for each
    number of arguments that a call may have.
    """

    def __init__(
        self,
        op: Op,
        backward: Callable,
        save: Callable | None,
        saved: Sequence[str],
        without_gradient: Sequence[str],
    ):
        self.op, self.backward, self.save = op, backward, save
        self.refused = [(op.places[n], n) for n in without_gradient]
        counts = range(len(op.names) + 1)
        self.tensors = [_getter(i for i in op.tensors if i < n) for n in counts]
        self.others = [_getter(i for i in range(n) if i not in op.tensors) for n in counts]
        tensor_names = tuple(op.names[i] for i in op.tensors)
        self.other_names = tuple(n for n in op.names if n not in tensor_names)
        self.saved = tuple(saved) or (*op.results, *tensor_names)
        self.grad_names = tuple(f"grad_{r}" for r in op.results)
        every = dict(zip(op.names, op.defaults, strict=True)) | dict.fromkeys(self.grad_names)
        self.defaults = {
            name: every[name] for name in inspect.signature(backward).parameters if name in every
        }
        self.default_values = tuple(self.defaults.values())
        self.needs: dict[tuple[bool, ...], frozenset[str]] = {}
        self.orders: dict[tuple[int, int, int], tuple[str, ...]] = {}

    def keep(self, ctx: Any, args: Sequence, results: Sequence[Tensor]) -> None:
        """args: without trailing defaults."""
        n = len(args)
        for i, name in self.refused:
            if i < n and ctx.needs_input_grad[i]:
                raise ValueError(
                    f"{self.op.said}: {name} requires a gradient and has none; pass {name}.detach()"
                )
        if isinstance(results, Tensor):  # the op has one result
            results = (results,)
        if self.save is None:
            ctx.save_for_backward(*results, *self.tensors[n](args))
        else:
            tensors, ctx.more = self.save(ctx.needs_input_grad, args, *results)
            ctx.save_for_backward(*tensors)
        ctx.others = self.others[n](args)

    def gradients(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
        tensors, others = ctx.saved_tensors, ctx.others
        counts = len(tensors), len(others), len(grads)
        order = self.orders.get(counts)
        if order is None:
            names = (self.saved, self.other_names, self.grad_names)
            parts = [part[:n] for part, n in zip(names, counts, strict=True)]
            order = self.orders[counts] = tuple(itertools.chain(self.defaults, *parts))
        # defaults come first, so that a later value of the same name replaces them
        given = (*self.default_values, *tensors, *others, *grads)
        values = dict(zip(order, given, strict=True))
        if self.save is not None:
            values.update(ctx.more)
        wanted = ctx.needs_input_grad
        needs = self.needs.get(wanted)
        if needs is None:
            needs = self.needs[wanted] = frozenset(
                n for n, w in zip(self.op.names, wanted, strict=False) if w
            )
        if any_autocast():
            with below_autocast():
                made = self.backward(needs, **values)
        else:
            made = self.backward(needs, **values)
        return tuple(
            [made.get(name) if name in needs else None for name in self.op.names[: len(wanted)]]
        )


def _getter(places: Any) -> Callable[[Sequence], tuple]:
    places = tuple(places)
    if len(places) == 0:
        return lambda args: ()
    if len(places) == 1:
        return lambda args, i=places[0]: (args[i],)
    return itemgetter(*places)


def _fast_of_first(rules: _Rules, below: Callable) -> Callable:
    """The form for a call whose backward reads no result but the first. `below` computes only that
    one."""
    keep = rules.keep

    def forward(ctx, *args):
        result = below(*args)
        keep(ctx, args, (result, None))
        return result

    return _apply_of(_function(rules.op.name, forward=forward, backward=_backward_of(rules)))


def _backward_of(rules: _Rules) -> Callable:
    def backward(ctx, *grads):
        if grads[0] is None and not any(grad is not None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return rules.gradients(ctx, grads)

    return backward


def _fast(rules: _Rules, first: bool, below: Callable) -> Callable:
    """The form for an eager call. Forward saves its context itself, and arguments come without
    trailing defaults."""
    keep = rules.keep

    def forward_of_first(ctx, *args):
        results = below(*args)
        keep(ctx, args, results)
        return results[0]

    def forward_of_all(ctx, *args):
        results = below(*args)
        keep(ctx, args, (results,) if isinstance(results, Tensor) else results)
        ctx.set_materialize_grads(False)
        return results

    def forward_of_one(ctx, *args):
        result = below(*args)
        keep(ctx, args, (result,))
        return result

    forward = (
        forward_of_first
        if first
        else forward_of_one
        if len(rules.op.results) == 1
        else forward_of_all
    )
    return _apply_of(_function(rules.op.name, forward=forward, backward=_backward_of(rules)))


def _with_setup_context(op: Op, rules: _Rules) -> type[Function]:
    """The form for torch.func. It takes all arguments and returns all results."""
    every = rules.op

    def forward(*args):
        return every.unguarded(*args)  # under vmap this calls the op's rule

    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        rules.keep(ctx, inputs, output if isinstance(output, tuple) else (output,))

    def backward(ctx, *grads):
        if all(grad is None for grad in grads):
            return (None,) * len(every.names)
        return rules.gradients(ctx, grads)

    def jvp(ctx, *tangents):
        raise NotImplementedError(no_forward_mode(op))

    return _function(
        every.name,
        forward=forward,
        setup_context=setup_context,
        backward=backward,
        jvp=jvp,
        generate_vmap_rule=True,
    )


def _function(name: str, **members: Any) -> type[Function]:
    name = "_" + "".join(part.capitalize() for part in name.removesuffix("_fwd").split("_"))
    return type(
        name, (Function,), {n: staticmethod(f) if callable(f) else f for n, f in members.items()}
    )


def _apply_of(function: type[Function]) -> Callable:
    """function.apply without the 5 us in which torch prepares for torch.func. This form does not
    serve torch.func."""
    return super(Function, function).apply


def write_out(op: Op, serves: Callable, forward: Callable, gradients: Callable) -> None:
    """Gives op.differentiate a second Function for its most frequent calls, those for which
    ``serves(args)`` is true. It has none of the look-ups by name above: forward and backward of
    small tensors take 0.85 of the host time (docs/worklog/host_time.md).

    ``forward(ctx, *args)`` is that of the Function, below autograd. ``gradients(ctx, grad)`` returns
    the gradients of args for that of the first result, which is not None; autocast is off. The
    other results have no gradient.
    """

    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        if any_autocast():
            with below_autocast():
                return gradients(ctx, grad)
        return gradients(ctx, grad)

    frequent = _apply_of(_function(op.name, forward=forward, backward=backward))
    general = op.differentiate

    def differentiate(*args):
        return frequent(*args) if serves(args) else general(*args)

    op.differentiate = differentiate


def seen(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a second derivative, a compiler, a mode or a subclass may see what a backward calls.
    If not, the backward may call ops below autograd."""
    return is_grad_enabled() or traced() or has_torch_function(tensors)


# ---- no gradients --------------------------------------------------------------------------------


def refuse(op: Op, reason: str) -> None:
    """Sets op.differentiate and op.transformed for an op without a gradient. A backward through it
    raises NotImplementedError. Without this, torch would silently
    return zeros."""
    message = f"{NAMESPACE}::{reason}"

    def fast_forward(ctx, *args):
        return op.below(*args)

    def forward(*args):
        return op.unguarded(*args)

    def setup_context(ctx, inputs, output):
        pass

    def backward(ctx, *grads):
        raise NotImplementedError(message)

    def jvp(ctx, *tangents):
        raise NotImplementedError(no_forward_mode(op))

    op.differentiate = _apply_of(_function("no_backward", forward=fast_forward, backward=backward))
    slow = _function(
        "no_backward",
        forward=forward,
        setup_context=setup_context,
        backward=backward,
        jvp=jvp,
        generate_vmap_rule=True,
    )
    op.transformed = slow.apply
