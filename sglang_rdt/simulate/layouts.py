"""How trainer and engines are spread over GPUs, and whether a model can be spread like that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_rdt.brief import brief
from sglang_rdt.simulate.errors import SimulateError
from sglang_rdt.simulate.shapes import ModelShape

# SGLang pads the vocabulary to a multiple of this (of it times TP, where TP does not divide it),
# Megatron to a multiple of 128 times TP.
ENGINE_VOCAB = 64
TRAINER_VOCAB = 128
# On either side; every rank is simulated.
MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class TrainerLayout:
    """Megatron's ranks: ``tp * cp * dp`` of them in each of ``pp`` pipeline stages.

    Args:
        etp: tensor parallel ranks of the experts; None: ``tp``, as Megatron has it.
        vpp: model chunks per pipeline stage.
        stages: layers of each stage; empty: as even as can be, the first ones have one more.

    Raises:
        SimulateError: the numbers do not fit together.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_world("--trainer", self.world)
        inner = self.tp * self.cp * self.dp
        if inner % (self.ep * self.expert_tp):
            raise SimulateError(
                f"--trainer: tp*cp*dp = {inner} is no multiple of ep*etp = "
                f"{self.ep * self.expert_tp} (etp is tp unless it is given)"
            )
        if self.stages and (len(self.stages) != self.pp or min(self.stages) < 1):
            raise SimulateError(
                f"--stages: {len(self.stages)} stages for pp={self.pp}; each needs a layer"
            )
        if self.stages and self.vpp > 1:
            raise SimulateError("--stages: not together with vpp")

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.tp * self.cp * self.dp * self.pp

    def layers_of(self, layers: int) -> list[list[int]]:
        """Numbers of the layers of each pipeline stage.

        Raises:
            SimulateError: a stage would have none, or the chunks of ``vpp`` would be uneven.
        """
        if self.pp > layers:
            raise SimulateError(f"--trainer: pp={self.pp} stages for {layers} layers")
        if self.vpp > 1:
            if layers % (self.pp * self.vpp):
                raise SimulateError(
                    f"--trainer: {layers} layers are no multiple of pp*vpp = {self.pp * self.vpp}"
                )
            each = layers // (self.pp * self.vpp)
            return [
                [n for n in range(layers) if n // each % self.pp == stage]
                for stage in range(self.pp)
            ]
        counts = self.stages or [layers // self.pp + (s < layers % self.pp) for s in range(self.pp)]
        if sum(counts) != layers:
            raise SimulateError(f"--stages: {sum(counts)} layers in all, the model has {layers}")
        return _consecutive(counts)

    def check(self, shape: ModelShape) -> None:
        """Whether ``shape`` can be cut like this.

        Raises:
            SimulateError: naming the first size that does not divide.
        """
        self.layers_of(shape.layers)
        what = "--trainer"
        _divides(what, "tp", self.tp, shape.heads, "attention heads")
        if shape.mla is None:
            _divides(what, "tp", self.tp, shape.kv_heads, "key-value heads")
        _check_mlp(what, shape, self.tp)
        _check_experts(what, shape, self.ep, self.expert_tp, "etp")

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True)
class EngineLayout:
    """SGLang's ranks: ``tp`` in each of ``pp`` pipeline stages, ``dp`` times, without DP attention.
    Of the ``tp`` ranks ``ep`` groups hold different experts.

    Raises:
        SimulateError: ``ep`` does not divide ``tp``.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        check_world("--engine", self.world)
        if self.tp % self.ep:
            raise SimulateError(f"--engine: ep={self.ep} does not divide tp={self.tp}")

    @property
    def world(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Over how many ranks each expert is cut."""
        return self.tp // self.ep

    def layers_of(self, layers: int) -> list[list[int]]:
        """Numbers of the layers of each pipeline stage; the last ones have one more."""
        if self.pp > layers:
            raise SimulateError(f"--engine: pp={self.pp} stages for {layers} layers")
        rest = layers % self.pp
        return _consecutive([layers // self.pp + (s >= self.pp - rest) for s in range(self.pp)])

    def padded_vocab(self, vocab: int) -> int:
        """Rows of the embedding over all tensor parallel ranks."""
        return padded(
            vocab, ENGINE_VOCAB if ENGINE_VOCAB % self.tp == 0 else ENGINE_VOCAB * self.tp
        )

    def check(self, shape: ModelShape) -> None:
        """Whether SGLang could load ``shape`` like this.

        Raises:
            SimulateError: naming the first size that does not divide.
        """
        self.layers_of(shape.layers)
        what = "--engine"
        _divides(what, "tp", self.tp, shape.heads, "attention heads")
        kv = shape.kv_heads
        if shape.mla is None and kv % self.tp and self.tp % kv:
            raise SimulateError(
                f"{what}: tp={self.tp} and {kv} key-value heads: neither divides the other"
            )
        _check_mlp(what, shape, self.tp)
        _check_experts(what, shape, self.ep, self.expert_tp, "tp/ep")

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True)
class Placement:
    """Which GPU is in which node.

    Args:
        trainer_gpus, engine_gpus: GPUs per node.
        how: "separate": trainer and engines have nodes of their own; "packed": the engines' GPUs
            follow the trainer's in nodes of ``trainer_gpus``.
    """

    trainer_gpus: int = 8
    engine_gpus: int = 8
    how: Literal["separate", "packed"] = "separate"

    def trainer_node(self, rank: int) -> str:
        """The node of a trainer rank."""
        name = "node" if self.how == "packed" else "trainer-node"
        return f"{name}{rank // self.trainer_gpus}"

    def engine_node(self, number: int, trainers: int) -> str:
        """The node of the engines' GPU ``number``, counted over all engines."""
        if self.how == "packed":
            return f"node{(trainers + number) // self.trainer_gpus}"
        return f"engine-node{number // self.engine_gpus}"


def parse(option: str, text: str, names: Sequence[str]) -> dict[str, int]:
    """``tp=2,pp=1`` as a dictionary of what is in it.

    Raises:
        SimulateError: an unknown name, one that is there twice, or no positive number.
    """
    counts: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, number = (p.strip() for p in part.partition("="))
        if name not in names or not equals:
            expected = ",".join(f"{n}=1" for n in names)
            raise SimulateError(
                f"{option} {brief(text)}: expected some of {expected}, not {brief(part)}"
            )
        if name in counts:
            raise SimulateError(f"{option} {brief(text)}: {name} is there twice")
        if not _is_number(number) or not 1 <= int(number) <= MAX_RANKS:
            raise SimulateError(
                f"{option} {brief(text)}: {name} must be a number, 1 or more (at most {MAX_RANKS})"
            )
        counts[name] = int(number)
    return counts


def parse_trainer(text: str, stages: str | None = None) -> TrainerLayout:
    """``tp=8,pp=4,ep=64,etp=1,dp=8``, and the layers of each stage as ``16,15,15,15``.

    Raises:
        SimulateError: it cannot be.
    """
    layers = (stages or "").replace(" ", "")
    if layers and not all(map(_is_number, layers.split(","))):
        raise SimulateError(
            f"--stages {brief(stages)}: expected numbers of layers such as 16,15,15,15"
        )
    counts = parse("--trainer", text, ("tp", "pp", "ep", "etp", "dp", "cp", "vpp"))
    numbers = tuple(int(n) for n in layers.split(",")) if layers else ()
    return TrainerLayout(**counts, stages=numbers)


def parse_engine(text: str) -> EngineLayout:
    """``tp=8,ep=8``.

    Raises:
        SimulateError: it cannot be.
    """
    return EngineLayout(**parse("--engine", text, ("tp", "ep", "pp", "dp")))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def check_world(option: str, ranks: int) -> None:
    """Raises SimulateError for more ranks than anybody has."""
    if ranks > MAX_RANKS:
        raise SimulateError(f"{option}: {ranks} ranks, more than {MAX_RANKS}")


def padded(number: int, multiple: int) -> int:
    """``number`` rounded up to a multiple."""
    return -(-number // multiple) * multiple


def _consecutive(counts: Sequence[int]) -> list[list[int]]:
    out, at = [], 0
    for count in counts:
        out.append(list(range(at, at + count)))
        at += count
    return out


def _divides(option: str, name: str, size: int, number: int, what: str) -> None:
    if number % size:
        raise SimulateError(f"{option}: {name}={size} does not divide {number} {what}")


def _check_mlp(option: str, shape: ModelShape, tp: int) -> None:
    if not shape.experts or shape.dense_layers:
        _divides(option, "tp", tp, shape.intermediate, "columns of the MLP")
    if shape.shared_intermediate:
        _divides(option, "tp", tp, shape.shared_intermediate, "columns of the shared experts")


def _check_experts(option: str, shape: ModelShape, ep: int, etp: int, name: str) -> None:
    if not shape.experts:
        if ep > 1:
            raise SimulateError(f"{option}: ep={ep}, but {shape.name} has no experts")
        return
    if ep > shape.experts:
        raise SimulateError(f"{option}: ep={ep} is more than {shape.experts} experts")
    _divides(option, "ep", ep, shape.experts, "experts")
    _divides(option, name, etp, shape.moe_intermediate, "columns of an expert")


def _text(layout: TrainerLayout | EngineLayout) -> str:
    values = dataclasses.asdict(layout)
    stages = values.pop("stages", ())
    parts = [f"{k}={v}" for k, v in values.items() if v is not None and not (k == "vpp" and v == 1)]
    return ",".join(parts) + (f" ({'/'.join(map(str, stages))} layers)" if stages else "")
