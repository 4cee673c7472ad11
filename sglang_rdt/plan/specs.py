"""What both sides report about themselves: plain data, picklable, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from sglang_rdt.plan.slices import Slice

# Bytes per element of every dtype that weights come in, by torch's name without "torch.".
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

# Conversions that keep every value exactly.
LOSSLESS = {
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float64"),
    ("float16", "float64"),
    ("float32", "float64"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One HF tensor as the trainer will yield it: full shape, dtype by torch's short name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One live parameter or buffer of an engine rank.

    ``storage`` identifies the memory block (tied weights share it) and ``offset`` the first
    element in it; both only compare within one describe() of one rank.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int
    offset: int
    buffer: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one touched."""
        return (
            1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            if self.numel
            else 0
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Want:
    """Engine side: the slice ``dst`` of parameter ``param`` comes from slice ``src`` of the HF
    tensor ``source``. Both slices have the same shape."""

    param: str
    dst: Slice
    source: str
    src: Slice


@dataclass(frozen=True, slots=True)
class Constant:
    """Engine side: the loader sets slice ``dst`` of ``param`` to ``value`` (padding rows)."""

    param: str
    dst: Slice
    value: float


@dataclass(frozen=True, slots=True)
class Write:
    """Engine side: the loader writes slice ``dst`` of ``param`` with something that it computes."""

    param: str
    dst: Slice


@dataclass(frozen=True, slots=True)
class Computed:
    """Engine side: what the loader computes of ``sources`` (HF tensors, in its order), and writes.

    These HF tensors are pulled whole, into scratch memory (:func:`scratch_name`), and the loader
    runs on them there. ``why``: what it does that is no copy of slices.
    """

    sources: tuple[str, ...]
    writes: tuple[Write, ...]
    why: str

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters that it writes, each once."""
        return tuple(dict.fromkeys(write.param for write in self.writes))


_SCRATCH = "computed:"


def scratch_name(source: str) -> str:
    """Under which name an engine rank describes the scratch memory for an HF tensor."""
    return f"{_SCRATCH}{source}"


def is_scratch(param: str) -> bool:
    """Whether this names scratch memory, not a parameter of the model."""
    return param.startswith(_SCRATCH)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a sync leaves as it is, because a name filter says so or because it belongs to another
    model: ``names`` of HF tensors, and what the loader would do with them.

    ``params``: engine parameters that the trainer has nothing for, and that stay by the user's word.
    """

    names: frozenset[str] = frozenset()
    wants: tuple[Want, ...] = ()
    constants: tuple[Constant, ...] = ()
    computed: tuple[Computed, ...] = ()
    params: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that one engine rank's ``load_weights`` does with a set of HF tensors.

    ``padding``: parameter -> how many of its elements the model's layout leaves to constants
    (rows that pad a vocabulary). A loader that fills more got a tensor that is too small.
    ``kept``: what is not done in a sync, see :mod:`sglang_rdt.plan.selection`; ``wants`` and
    ``constants`` are without it.
    """

    wants: tuple[Want, ...]
    constants: tuple[Constant, ...] = ()
    padding: dict[str, int] = field(default_factory=dict)
    computed: tuple[Computed, ...] = ()
    kept: Kept = Kept()

    def whole(self) -> Recording:
        """With what is kept: all that the loader does."""
        kept = self.kept
        if not (kept.wants or kept.constants or kept.computed):
            return self
        return replace(
            self,
            wants=self.wants + kept.wants,
            constants=self.constants + kept.constants,
            computed=self.computed + kept.computed,
        )


@dataclass(frozen=True, slots=True)
class RankId:
    """Coordinates of one engine rank."""

    dp: int
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp}_pp{self.pp}_tp{self.tp}"


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One SchedulerActor: who it is, where it runs, what it holds.

    ``instance`` changes with every start of the engine: a restarted engine is a new one.
    ``runners``: which models it has, and which tensors drafts share with the target.
    """

    engine: str
    rank: RankId
    actor_name: str
    namespace: str
    node_ip: str
    instance: str
    dp_size: int
    pp_size: int
    tp_size: int
    dp_attention: bool = False
    ep_size: int = 1
    released_name: str = ""
    sglang_version: str = ""
    package_version: str = ""
    weight_version: str = ""
    state: str = "current"
    runners: str = "target"

    def __str__(self) -> str:
        return f"{self.engine} {self.rank}"

    @property
    def world_size(self) -> int:
        """How many actors the whole engine has."""
        return self.tp_size * self.pp_size * (1 if self.dp_attention else self.dp_size)


@dataclass(frozen=True, slots=True)
class EngineRankLayout:
    """What planning needs of one engine rank: identity, parameters, recording."""

    rank: EngineRank
    params: tuple[ParamSpec, ...]
    recording: Recording


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of trainer memory that is registered as a whole: a parameter buffer, or a
    parameter's own storage. ``name`` is for messages."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Trainer side: the slice ``hf`` of HF tensor ``source`` is the slice ``local`` of this rank's
    block number ``block``. Both slices have the same shape; ``local`` counts elements of ``dtype``
    from the block's first byte."""

    source: str
    hf: Slice
    block: int
    local: Slice
    dtype: str


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """One trainer process: coordinates for messages, node for routing, the HF tensors that it
    will hold whole, one after the other, in this order (bucketed mode), and what it holds of which
    HF tensor all the time (direct mode)."""

    rank: int
    node_ip: str
    exports: tuple[TensorSpec, ...]
    coordinates: dict[str, int] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    holds: tuple[Hold, ...] = ()

    def __str__(self) -> str:
        where = " ".join(f"{k}{v}" for k, v in self.coordinates.items())
        return f"trainer rank {self.rank}" + (f" ({where})" if where else "")
