"""Automatic memory optimizer for PyTorch."""

__version__ = "0.1.0"
