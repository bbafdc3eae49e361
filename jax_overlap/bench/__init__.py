"""Benchmarks with their baselines in one run: `python -m jax_overlap.bench <op>`."""
