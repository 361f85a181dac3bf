"""Lightning strategies for private training on several devices."""

from dp_lightning.strategies.private import PrivateStrategy

__all__ = ["PrivateStrategy"]
