"""M-Rules: transformations of a program, one file each (paper section 5.2)."""
