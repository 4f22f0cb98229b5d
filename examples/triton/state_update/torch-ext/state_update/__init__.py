"""Steps of state space models."""

from .kernels import state_update

__all__ = ["state_update"]
