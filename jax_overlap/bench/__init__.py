"""Benchmarks: `python -m jax_overlap.bench <op>`, each with its baselines in one run."""
