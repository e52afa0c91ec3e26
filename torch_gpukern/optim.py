# SPDX-License-Identifier: BSD-3-Clause
"""Optimisers: `AdamW`, which updates all parameters of a dtype in one launch."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .ops.adamw import adamw_

__all__ = ["AdamW"]

_OPTIONS = ("master_weights", "stochastic_rounding")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """AdamW with the semantics and state_dict of torch.optim.AdamW, in one launch for all
    parameters of a dtype.

    For each parameter w with gradient g, in float32 (float64 for float64), rounded once::

        w = w (1 - lr weight_decay);  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)

    Steps are counted on the parameters' device and the host reads nothing, so a step can be
    captured in a CUDA graph. With torch.amp.GradScaler, the scale and the flag for infinities are
    read on the device, too. Gradients are not written.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for torch.optim.AdamW. lr may be
            a tensor on the parameters' device, which a captured graph then reads; a number becomes
            part of the graph.
        master_weights: optimise a float32 copy of each 16-bit parameter, ``master`` in its state.
            The parameter is the copy's rounding. m and v are float32, too. If a parameter is
            written between steps (`copy_`, `clamp_`, load_state_dict) and no longer is its master's
            rounding, the next step takes the new value over. A write through ``p.data`` is not
            noticed.
        stochastic_rounding: round bfloat16 parameters up or down at random, so that the expected
            value is exact and small steps are not lost. m and v are float32. Each step draws a seed
            from torch's generator.

    Without either option, m and v have the parameter's dtype, as in torch.

    Parameters are float32, bfloat16, float16 or float64, dense in some order of their dimensions,
    on the CPU or CUDA. They may be DTensors (FSDP2, tensor parallelism); each rank then updates its
    own part. With stochastic_rounding, parts that ranks replicate stay equal only if the ranks'
    generators are equal. state_dict() and load_state_dict() exchange state with torch.optim.AdamW
    (``fused=True``, ``capturable=True``).

    Raises:
        ValueError: both master_weights and stochastic_rounding; stochastic rounding of float16; a
            parameter that is not dense; sparse or complex gradients.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ):
        if master_weights and stochastic_rounding:
            raise ValueError(
                "AdamW: master_weights and stochastic_rounding exclude each other; choose one"
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )
        # these options hold for all groups; copies and pickles keep `defaults`
        self.defaults |= {
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
        }
        self._clip: Tensor | None = None
        # `_written` after the last step, for each parameter with a master
        self._stepped: dict[Tensor, tuple[int, int]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._clip, self._stepped = None, {}
        for name in _OPTIONS:
            self.defaults.setdefault(name, False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. master_weights and stochastic_rounding hold for all groups.

        Raises:
            ValueError: the group has a value for one of them.
        """
        for name in _OPTIONS:
            if name in param_group:
                raise ValueError(
                    f"AdamW: {name} holds for all groups, but a group has {param_group[name]!r}; "
                    f"make one optimiser for each value"
                )
        kept = {name: self.defaults.pop(name) for name in _OPTIONS if name in self.defaults}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults |= kept

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Makes the next step multiply gradients by min(1, max_norm / norm), on the device and
        without writing them.

        Returns the 2-norm of all gradients. If a GradScaler has scaled them, unscale them first.
        """
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not grads:
            return torch.zeros(())
        norm = torch.nn.utils.get_total_norm(grads)
        # a DTensor's norm covers all ranks' parts
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._clip = (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step; `closure` recomputes the loss with gradients and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for lists in self._lists_of(group):
                self._update(group, lists, scaler, found_inf)
        self._clip = None
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the state may be that of torch.optim.AdamW. State that is float32 beside a
        16-bit parameter stays float32."""
        kept = {name: self.defaults[name] for name in _OPTIONS}
        given: list[dict[str, Any]] = []
        # hooks run in order, so this one sees the state_dict that the user's hooks have made
        hook = self.register_load_state_dict_pre_hook(lambda _, last: given.append(last))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self.defaults |= kept
        state_dict = given[0]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, ours, strict=True):  # undo torch's cast to the parameter's dtype
            for name in ("master", *_MOMENTS):
                loaded = state_dict["state"].get(i, {}).get(name)
                if loaded is not None and loaded.dtype != self.state[p][name].dtype:
                    self.state[p][name] = loaded.to(p.device, copy=True)
            if p in self.state and "exp_avg" in self.state[p]:
                self._widen(p, self.state[p])

    # ---- the parts of a step ---------------------------------------------------------------------
    def _wide(self, p: Tensor) -> bool:
        """Whether p has 16 bits and its state is float32."""
        return p.itemsize == 2 and (
            self.defaults["master_weights"] or self.defaults["stochastic_rounding"]
        )

    def _widen(self, p: Tensor, state: dict[str, Any]) -> None:
        """Converts loaded state to the dtypes, strides and device that this optimiser uses."""
        dtype = torch.float32 if self._wide(p) else p.dtype
        # torch.optim.AdamW keeps steps on the CPU by default, older ones as numbers or as [1]
        state["step"] = torch.as_tensor(state["step"]).to(p.device, torch.float32).reshape(())
        for name in _MOMENTS:
            if name in state:
                state[name] = _laid_as(p, state[name].to(dtype))
        master = state.pop("master", None)
        if p.itemsize == 2 and self.defaults["master_weights"]:
            # torch's optimiser carries a master along in 16 bits without updating it
            stale = master is None or master.dtype != torch.float32
            state["master"] = p.detach().float() if stale else _laid_as(p, master)

    def _state_of(self, p: Tensor, amsgrad: bool) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            dtype = torch.float32 if self._wide(p) else p.dtype
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for name in _MOMENTS[: 3 if amsgrad else 2]:
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            if p.itemsize == 2 and self.defaults["master_weights"]:
                state["master"] = p.detach().float()
        elif "master" in state and self._stepped.get(p) != _written(p):
            # The parameter may have been written since the last step. Where it is no longer the
            # master's rounding, take its value.
            master, w = _local(state["master"]), _local(p)
            master.copy_(torch.where(master.to(w.dtype) == w, master, w.float()))
        return state

    def _lists_of(self, group: dict[str, Any]) -> Iterable[list[tuple[Tensor, Tensor, dict]]]:
        """Lists of (parameter, gradient, state) of the parameters with a gradient, one list for
        each device and dtype."""
        lists: dict[tuple, list] = {}
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise ValueError(
                    "AdamW: gradients must be strided (dense) tensors; torch.optim.SparseAdam "
                    "takes sparse ones"
                )
            if hasattr(grad, "to_local") and grad.placements != p.placements:
                grad = grad.redistribute(p.device_mesh, p.placements)
            state, w, grad = self._state_of(p, group["amsgrad"]), _local(p), _local(grad)
            wide = grad.dtype != p.dtype  # p.grad_dtype was set
            if wide and p.itemsize == 2 and self.defaults["stochastic_rounding"]:
                raise ValueError(
                    f"AdamW: stochastic_rounding takes gradients in the parameter's dtype "
                    f"{str(p.dtype)[6:]}, got "
                    f"{str(grad.dtype)[6:]}; leave p.grad_dtype as it is, or use master_weights"
                )
            dtype = torch.float32 if wide and p.itemsize == 2 else p.dtype
            if grad.dtype != dtype or grad.stride() != w.stride():
                grad = torch.empty_like(w, dtype=dtype).copy_(grad)
            lists.setdefault((p.device, p.dtype, dtype), []).append((p, grad, state))
        return lists.values()

    def _update(
        self, group: dict[str, Any], lists: list, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """The step of one list of `_lists_of`."""
        params, grads, states = zip(*lists, strict=True)
        device = params[0].device

        def state_of(name: str) -> list[Tensor]:
            return [_local(state[name]) for state in states]

        steps = state_of("step")
        maxima = state_of("max_exp_avg_sq") if group["amsgrad"] else []
        masters = state_of("master") if "master" in states[0] else []
        weights = [_local(p) for p in params]
        stored = [weights, state_of("exp_avg"), state_of("exp_avg_sq"), maxima, masters]
        passed = stored
        if grads[0].dtype != params[0].dtype:
            # float32 gradients of 16-bit parameters: step in float32, then round once
            passed = [masters or _float(weights), *map(_float, stored[1:4]), []]
        found_inf = _scalar(found_inf, device)
        counted = 1 if found_inf is None else (found_inf == 0).float()  # 0 if the step is skipped
        torch._foreach_add_(steps, counted)
        try:
            adamw_(
                passed[0],
                list(grads),
                *passed[1:],
                steps,
                grad_scale=_scalar(scale, device),
                clip=_scalar(self._clip, device),
                found_inf=found_inf,
                seed=self._seed(params[0]),
                **_numbers(group, device),
            )
        except BaseException:
            torch._foreach_sub_(steps, counted)  # a step that raises is not counted
            raise
        if passed is not stored:
            for to, made in zip(stored[:4], passed[:4], strict=True):
                if to and to is not made:
                    torch._foreach_copy_(to, made)
        if wholes := [p for p in params if hasattr(p, "to_local")]:
            increment_version(wholes)  # adamw_ wrote their local parts
        if masters:
            self._stepped.update((p, _written(p)) for p in params)

    def _seed(self, p: Tensor) -> Tensor | None:
        """A new seed on p's device if p is rounded at random; it is drawn from torch's generator."""
        if not self.defaults["stochastic_rounding"] or p.dtype not in (
            torch.bfloat16,
            torch.float16,
        ):
            return None
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=p.device)


def _scalar(x: Tensor | None, device: torch.device) -> Tensor | None:
    """x as float32 [] on the device."""
    return None if x is None else x.to(device, torch.float32).reshape(())


def _numbers(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The numbers of a parameter group, as arguments of `adamw_`."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    given_lr = isinstance(lr, Tensor)
    return {
        "lr_tensor": _scalar(lr, device) if given_lr else None,
        "lr": 0.0 if given_lr else float(lr),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": group["maximize"],
    }


def _laid_as(p: Tensor, x: Tensor) -> Tensor:
    """x with p's strides; x itself if it has them."""
    return x if x.stride() == p.stride() else torch.empty_like(p, dtype=x.dtype).copy_(x)


def _float(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors in float32; float32 tensors themselves, not copies."""
    return [x.float() for x in tensors]


def _written(p: Tensor) -> tuple[int, int]:
    """A value on the host that changes when p is written or gets other memory. A write through
    ``p.data`` does not change it."""
    return p._version, _local(p).data_ptr()


def _local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself. AdamW is elementwise, so each rank
    can update its part alone."""
    if not hasattr(x, "to_local"):
        return x
    # FSDP2's part of a weight may be a subclass with hooks (nn.fp8_all_gather)
    return x.to_local().as_subclass(Tensor)
