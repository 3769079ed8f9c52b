"""Order: when each operator runs. Re-ordering costs no time (paper section 5.1)."""
