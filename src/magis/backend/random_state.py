"""The random generator of a device: read and put back, so that a recomputed draw gives the same numbers."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)  # type: ignore[no-any-return]
    return torch.default_generator.get_state()  # type: ignore[no-any-return]


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Puts a state back into the device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.default_generator.set_state(state)
