"""What differs between machines, and nothing else.

``detect()`` asks each module of this folder that has a ``probe`` function, in the order of its
``PRIORITY``; the first that finds its device serves. A new chip is a new file here.
"""

from __future__ import annotations

import importlib
import pkgutil

from nanochat.errors import UserError
from nanochat.hardware.device import Device, Prober


def probers() -> dict[str, Prober]:
    """The kinds of device this installation knows, most wanted first."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [module for module in modules if hasattr(module, "probe")]
    return {module.KIND: module.probe for module in sorted(found, key=lambda module: module.PRIORITY)}


def detect(kind: str | None = None) -> Device:
    """The device to compute on: the one asked for, else the best that is here.

    Raises:
        UserError: when ``kind`` is unknown, or no such device is here (with the reason).
    """
    known = probers()
    if kind:
        if kind not in known:
            raise UserError(f"device {kind!r} is not known: choose one of {', '.join(known)}")
        found = known[kind]()
        if isinstance(found, str):
            raise UserError(f"device {kind!r} cannot be used here: {found}; leave --device away to use what is there")
        return found
    for probe in known.values():
        found = probe()
        if not isinstance(found, str):
            return found
    raise UserError("no device was found to compute on, not even a CPU: is torch installed whole?")
