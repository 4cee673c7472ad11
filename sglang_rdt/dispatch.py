"""What the dispatch modes that record loaders and trace bridges ask of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among ``values``, and in lists and tuples in them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that ``func`` writes, by its schema: in place, ``out=``, lists."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in((args[i] if i < len(args) else kwargs.get(argument.name),))
    return found
