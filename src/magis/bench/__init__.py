"""Benchmarks that compare plans with what can be reached otherwise."""
