"""The optimizer of a whole model: AdamW and Muon over groups of parameters, state kept by name."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nanochat.errors import UserError
from nanochat.optim.adamw import adamw_step
from nanochat.optim.groups import AdamGroup, Group, MuonGroup
from nanochat.optim.muon import muon_step

StepFunction = Callable[..., None]
#: Something like ``torch.compile``.
Compiler = Callable[[StepFunction], StepFunction]


class Optimizer:
    """AdamW and Muon over the groups of :func:`nanochat.optim.groups.parameter_groups`.

    Args:
        parameters: every parameter by name, in its place and dtype; moments get the same.
        groups: which must name each parameter exactly once.
        row_equilibration: of Muon, see :func:`nanochat.optim.muon.muon_step`; likewise the next two.
        renormalize: likewise.
        compute_dtype: likewise.
        compiler: compiles the arithmetic of each group; None computes plainly. What changes between
            steps reaches it as tensors, so nothing is compiled twice.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[Group],
        *,
        row_equilibration: bool = True,
        renormalize: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        compiler: Compiler | None = None,
    ) -> None:
        grouped = [name for group in groups for name in group.names]
        assert sorted(grouped) == sorted(parameters), set(grouped) ^ set(parameters)
        self.step_count = 0
        muon_settings = {
            "row_equilibration": row_equilibration,
            "renormalize": renormalize,
            "compute_dtype": compute_dtype,
        }
        self._adam = [
            _AdamParameter(name, parameters[name], group, update)
            for group in groups
            if isinstance(group, AdamGroup)
            for update, names in _adam_updates(group, parameters, compiler)
            for name in names
        ]
        self._muon = [
            _MuonStack([parameters[name] for name in group.names], group, muon_settings, compiler)
            for group in groups
            if isinstance(group, MuonGroup)
        ]
        self._parameters = dict(parameters)

    @torch.no_grad()
    def step(self, lr_multiplier: float, muon_momentum: float, muon_weight_decay: float) -> None:
        """Update every parameter from its gradient.

        Args:
            lr_multiplier: on the rate of every group.
            muon_momentum: of the matrices, at this step; likewise the next.
            muon_weight_decay: of the matrices.
        """
        without = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        assert not without, f"parameters without gradient: {without}"
        self.step_count += 1
        for adam in self._adam:
            adam.step(self.step_count, lr_multiplier)
        for muon in self._muon:
            muon.step(lr_multiplier, muon_momentum, muon_weight_decay)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments as ``"<parameter name>.<moment>"``; views of the live state, which the next step changes.

        AdamW's ``exp_avg`` and ``exp_avg_sq`` are shaped like the parameter; Muon's ``momentum_buffer``
        too, its ``second_momentum_buffer`` is (m, 1) where m >= n, else (1, n).
        """
        tensors: dict[str, Tensor] = {}
        for adam in self._adam:
            tensors.update(adam.state_tensors())
        for muon in self._muon:
            tensors.update(muon.state_tensors())
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor], step_count: int) -> None:
        """Take over moments as :meth:`state_tensors` gives them, converted to this optimizer's dtypes.

        Raises:
            UserError: when names or shapes are not those of this model; nothing has changed then.
        """
        own = self.state_tensors()
        missing, unknown = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model has not"
            raise UserError(
                f"the optimizer state {what} ({len(missing)} missing, {len(unknown)} unknown tensors):"
                " it belongs to another model; load the one saved with it, or start without"
            )
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise UserError(
                    f"{name} of the optimizer state has shape {tuple(tensor.shape)} where the model needs"
                    f" {tuple(own[name].shape)}: load the one saved with it, or start without"
                )
        if step_count < 0:
            raise UserError(f"the step count of the optimizer state is {step_count}: it must be 0 or more")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self.step_count = step_count


class _AdamParameter:
    """One parameter with its moments."""

    def __init__(self, name: str, parameter: Parameter, group: AdamGroup, update: StepFunction) -> None:
        self._name, self._parameter, self._group, self._update = name, parameter, group, update
        self._exp_avg = torch.zeros_like(parameter, requires_grad=False)
        self._exp_avg_sq = torch.zeros_like(parameter, requires_grad=False)
        self._step_count, self._lr = _scalars(2, parameter.device)

    def step(self, step_count: int, lr_multiplier: float) -> None:
        group = self._group
        self._update(
            self._parameter,
            self._parameter.grad,
            self._exp_avg,
            self._exp_avg_sq,
            self._step_count.fill_(step_count),
            self._lr.fill_(group.lr * lr_multiplier),
            group.beta1,
            group.beta2,
            group.eps,
            group.weight_decay,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        return {f"{self._name}.exp_avg": self._exp_avg, f"{self._name}.exp_avg_sq": self._exp_avg_sq}


class _MuonStack:
    """All matrices of one shape with their buffers, which are kept stacked."""

    def __init__(
        self, parameters: list[Parameter], group: MuonGroup, settings: dict[str, Any], compiler: Compiler | None
    ) -> None:
        self._parameters, self._group, self._settings = parameters, group, settings
        rows, columns = group.shape
        first = parameters[0]
        self._momentum_buffer = first.new_zeros(len(parameters), rows, columns)
        reduced = (rows, 1) if rows >= columns else (1, columns)
        self._second_momentum_buffer = first.new_zeros(len(parameters), *reduced)
        self._lr, self._momentum, self._weight_decay = _scalars(3, first.device)
        self._update = _compiled(muon_step, f"muon_step_{rows}x{columns}", compiler)

    def step(self, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        stack = torch.stack(list(self._parameters))
        gradients = torch.stack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        self._update(
            stack,
            gradients,
            self._momentum_buffer,
            self._second_momentum_buffer,
            self._lr.fill_(self._group.lr * lr_multiplier),
            self._momentum.fill_(momentum),
            self._group.beta2,
            self._weight_decay.fill_(weight_decay),
            **self._settings,
        )
        for parameter, updated in zip(self._parameters, stack, strict=True):
            parameter.copy_(updated)

    def state_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for i, name in enumerate(self._group.names):
            tensors[f"{name}.momentum_buffer"] = self._momentum_buffer[i]
            tensors[f"{name}.second_momentum_buffer"] = self._second_momentum_buffer[i]
        return tensors


def _adam_updates(
    group: AdamGroup, parameters: Mapping[str, Parameter], compiler: Compiler | None
) -> list[tuple[StepFunction, list[str]]]:
    """The step of each kind of tensor in a group, with the names of those it serves."""
    kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name in group.names:
        kinds.setdefault((parameters[name].shape, parameters[name].dtype), []).append(name)
    return [(_compiled(adamw_step, f"adamw_step_{names[0]}", compiler), names) for names in kinds.values()]


def _scalars(count: int, device: torch.device) -> list[Tensor]:
    """0-dim tensors to be filled at each step: a compiled step sees new values without compiling again."""
    return [torch.zeros((), dtype=torch.float32, device=device) for _ in range(count)]


def _compiled(function: StepFunction, name: str, compiler: Compiler | None) -> StepFunction:
    """Compile a copy of the function that has its own code object.

    Compilers keep what they made, and limit how often they do it, per code object: with copies no
    number of shapes reaches the limit, and one shape never makes another's dimensions dynamic.
    """
    if compiler is None:
        return function
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return compiler(copy)
