"""Tiny random models of every family that people train, on both sides of a sync."""
