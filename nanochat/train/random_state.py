"""States of the random number generators: part of a checkpoint, so that a resumed run draws what it would have."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nanochat.errors import UserError


def start(seed: int) -> None:
    """Put all generators into the state that a new run with this seed begins with."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Tensor]:
    """The states of Python's, numpy's and torch's generators, as tensors of bytes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]
    return {
        "python": _pack(random.getstate()),
        "numpy": _pack(numpy_state),
        "torch": torch.get_rng_state(),
    }


def restore(states: Mapping[str, Tensor]) -> None:
    """Put the generators back into states of :func:`capture`.

    Raises:
        UserError: when a state is missing or damaged.
    """
    try:
        version, internal, gauss = json.loads(states["python"].numpy().tobytes())
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = json.loads(states["numpy"].numpy().tobytes())
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(states["torch"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"the saved random states cannot be used ({error}): resume from another step") from None


def _pack(state: object) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode("ascii")), dtype=torch.uint8)
