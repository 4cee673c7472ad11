"""Hostile values, and good values with one or a few hostile ones in them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Block,
    EngineRankLayout,
    Hold,
    ParamSpec,
    TensorSpec,
    TrainerRank,
    Want,
)

from ..builders import copy, engine_rank, layout, param, rect, spec

# CPU seconds for one refusal or one small plan. What this is to find takes minutes, or for ever.
SECONDS = 3.0


def examples(count: int) -> settings:
    """The same ``count`` examples every time; with the profile "thorough" more, and others."""
    thorough = settings.default.max_examples // 40
    return settings(max_examples=count * max(thorough, 1), derandomize=thorough <= 1)


@contextlib.contextmanager
def quickly(seconds: float = SECONDS) -> Iterator[None]:
    """What is inside takes no more CPU time than this."""
    begin = time.thread_time()
    yield
    assert time.thread_time() - begin < seconds


def check_sentence(error: BaseException, limit: int = 4000) -> None:
    """One that a person can read: text, bounded, no control characters but between lines."""
    text = str(error)
    assert text.strip()
    assert len(text) <= limit, len(text)
    for line in text.split("\n"):
        assert line.isprintable(), repr(line)


INTEGERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from(
        [sign * (1 << bits) + more for bits in (15, 24, 31, 32, 48, 62, 63, 64, 200)
         for more in (-1, 0, 1) for sign in (1, -1)]
    ),
)  # fmt: skip
LONG = "9" * 5000  # more digits than Python turns into a number
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "\n", "a\nb", "\x00", "\x1b[31m", "\ud800", "\u202e", "é" * 3, "x" * 100_000, LONG,
         "float32", "float7", "٣", "²", "None", "w/../x"]
    ),
)  # fmt: skip
FLOATS = st.one_of(
    st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1.0])
)
ANYTHING = st.one_of(
    INTEGERS,
    TEXTS,
    FLOATS,
    st.sampled_from(
        [None, True, False, b"", b"x" * 5000, (), (1,) * 17, (0,), (1 << 48, 1 << 48), [1, 2], {},
         {"a": 1}, object, 1j, (None,), ("a",)]
    ),
    st.builds(
        Slice,
        INTEGERS,
        st.lists(INTEGERS, max_size=3).map(tuple),
        st.lists(INTEGERS, max_size=3).map(tuple),
    ),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, value: Any, times: int = 3) -> Any:
    """``value`` (nested dataclasses, tuples, dictionaries) with up to ``times`` changes."""
    for _ in range(draw(st.integers(1, times))):
        value = _change(draw, value)
    return value


def _change(draw: st.DrawFn, value: Any) -> Any:
    # Mostly something deep inside: what is broken at the top is found at once.
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and draw(_DEEPER):
        field = draw(st.sampled_from(dataclasses.fields(value))).name
        return dataclasses.replace(value, **{field: _change(draw, getattr(value, field))})
    if isinstance(value, tuple | list) and value and draw(_DEEPER):
        at = draw(st.integers(0, len(value) - 1))
        items = list(value)
        kind = draw(st.sampled_from(["change", "change", "change", "drop", "twice", "swap"]))
        if kind == "change":
            items[at] = _change(draw, items[at])
        elif kind == "drop":
            del items[at]
        elif kind == "twice":
            items.insert(at, items[at])
        else:
            items[at], items[-1] = items[-1], items[at]
        return type(value)(items)
    if isinstance(value, dict) and value and draw(_DEEPER):
        key = draw(st.sampled_from(sorted(value, key=repr)))
        return {**value, key: _change(draw, value[key])}
    if type(value) is int and draw(st.booleans()):
        return draw(st.sampled_from([value + 1, value - 1, 2 * value, -value, float(value), 0]))
    return draw(ANYTHING)


_DEEPER = st.sampled_from([True] * 19 + [False])


# A trainer of two ranks and an engine of two that fit together: a vocabulary with a padding row,
# a matrix that is cut, one that is transposed, tied weights.

SPECS = (spec("e", (5, 2)), spec("w", (4, 6)), spec("t", (3, 4), "float16"), spec("s", ()))


def trainers() -> tuple[TrainerRank, ...]:
    """The trainer ranks: each has all, and half of ``w``."""
    out = []
    for rank in range(2):
        holds = (
            Hold("e", rect((5, 2)), 0, Slice(4, (5, 2), (2, 1)), "float32"),
            Hold("w", rect((4, 6), (2 * rank, 2 * rank + 2)), 1, rect((2, 6)), "float32"),
            Hold("t", rect((3, 4)), 2, Slice(0, (3, 4), (1, 3)), "float16"),
            Hold("s", rect(()), 0, Slice(0, (), ()), "float32"),
        )
        blocks = (Block("a", 64), Block("b", 48), Block("c", 24))
        out.append(TrainerRank(rank, f"10.0.0.{rank}", SPECS, {"tp": rank}, blocks, holds))
    return tuple(out)


def layouts() -> tuple[EngineRankLayout, ...]:
    """The engine ranks: each has the columns of ``w`` of its own."""
    from sglang_rdt.plan.specs import Constant

    out = []
    s = SPECS[3]
    for rank in range(2):
        pe = param("pe", (6, 2), storage=1)
        tied = param("tied", (6, 2), storage=1)
        pw = param("pw", (4, 3), storage=2)
        pt = param("pt", (3, 4), "float16", stride=(1, 3), storage=3)
        ps = param("ps", (), storage=4)
        cache = param("cache", (4,), "complex64", storage=5, buffer=True)
        wants = (
            Want("pe", rect((6, 2), (0, 5)), "e", rect((5, 2))),
            Want("pw", rect((4, 3)), "w", rect((4, 6), (0, 4), (3 * rank, 3 * rank + 3))),
            Want("pt", Slice(0, (3, 4), (1, 3)), "t", rect((3, 4))),
            copy(ps, s),
        )
        constants = (Constant("pe", rect((6, 2), (5, 6)), 0.0),)
        where = engine_rank(rank, tp_size=2, node=f"10.0.0.{rank}")
        out.append(layout((pe, tied, pw, pt, ps, cache), wants, constants, rank=where))
    return tuple(out)


def specs_of(params: tuple[ParamSpec, ...]) -> dict[str, ParamSpec]:
    """By name."""
    return {p.name: p for p in params}


__all__ = [
    "ANYTHING",
    "FLOATS",
    "INTEGERS",
    "LONG",
    "SPECS",
    "TEXTS",
    "TensorSpec",
    "check_sentence",
    "examples",
    "layouts",
    "mutated",
    "quickly",
    "specs_of",
    "trainers",
]
