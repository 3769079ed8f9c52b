"""PyTorch's names, literals and tensor types as the core sees them, both ways."""
