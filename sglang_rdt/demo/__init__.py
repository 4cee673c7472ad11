"""Tiny models and a tiny Megatron trainer: for demos, benchmarks and end-to-end tests."""
