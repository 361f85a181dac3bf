"""Differentially private training of vision models with PyTorch Lightning.

Import the packages by name (``dp_lightning.privacy``, ``dp_lightning.callbacks``, ...), so that
``import dp_lightning`` and ``dpl --help`` stay fast.
"""

__version__ = "0.1.0"
