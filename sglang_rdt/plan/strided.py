"""Contiguous runs of many strided slices at once.

All functions take arrays with one row per slice and one column per dimension, in elements; rows
with fewer dimensions have dimensions of size 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Expanded(NamedTuple):
    """Runs of many slices: ``row`` says of which slice, ``offsets[k]`` where the run starts on
    side ``k`` relative to the slice's own start."""

    row: NDArray[np.intp]
    length: Ints
    offsets: tuple[Ints, ...]


def run_lengths(shape: Ints, *strides: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Elements that lie one behind the other on all sides at once.

    Returns:
        Per slice the length of its runs, and per dimension whether it lies within the run.
    """
    run = np.ones(len(shape), np.int64)
    inside = shape <= 1
    for _ in range(shape.shape[1]):
        fits = ~inside
        for stride in strides:
            fits &= stride == run[:, None]
        found = fits.any(axis=1)
        if not found.any():
            break
        rows = np.flatnonzero(found)
        dims = fits.argmax(axis=1)[rows]
        inside[rows, dims] = True
        run[rows] *= shape[rows, dims]
    return run, inside


def count_runs(shape: Ints, *strides: Ints) -> Ints:
    """How many runs each slice has."""
    run, _ = run_lengths(shape, *strides)
    return shape.prod(axis=1) // run


def expand(shape: Ints, *strides: Ints) -> Expanded:
    """Every run of every slice."""
    run, inside = run_lengths(shape, *strides)
    sizes = np.where(inside, 1, shape)
    count = np.where((shape == 0).any(axis=1), 0, sizes.prod(axis=1))
    row = np.repeat(np.arange(len(shape)), count)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    offsets = tuple(np.zeros(len(row), np.int64) for _ in strides)
    for d in range(shape.shape[1] - 1, -1, -1):
        index, here = np.divmod(index, sizes[row, d])
        for offset, stride in zip(offsets, strides, strict=True):
            offset += here * stride[row, d]
    return Expanded(row, run[row], offsets)


def padded(rows: list[tuple[int, ...]], fill: int, width: int | None = None) -> Ints:
    """Tuples of different length as one array, filled up on the right."""
    if width is None:
        width = max((len(r) for r in rows), default=0)
    width = max(width, 1)
    flat: list[Any] = [r + (fill,) * (width - len(r)) for r in rows]
    return np.array(flat, np.int64).reshape(len(rows), width)
