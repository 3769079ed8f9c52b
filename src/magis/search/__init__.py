"""M-Optimizer: which transformations to apply, searched under limits on time and memory (paper section 6)."""
