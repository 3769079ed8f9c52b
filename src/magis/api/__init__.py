"""Plans and runs: what the command line and scripts call."""
