"""Rewrites: identities of real arithmetic, one rule a file (paper section 5.2, figure 1)."""
