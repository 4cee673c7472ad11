"""Recording a loader against running it with real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt.engine import recorder
from sglang_rdt.engine.recorder import describe_tensors, record_load
from sglang_rdt.engine.replay import replay, sources_in_order
from sglang_rdt.errors import RecordError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import (
    Constant,
    EngineRankLayout,
    Recording,
    TensorSpec,
    Want,
    scratch_name,
)

from .builders import copy, engine_rank, param, spec

Weights = dict[str, torch.Tensor]
Loader = Callable[["Model", Weights], None]


class Model(nn.Module):
    """Parameters by name, and a hand-written loader."""

    def __init__(self, loader: Loader, dtype: torch.dtype = torch.float32, **shapes: tuple) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            values = torch.arange(math.prod(shape)).view(shape) + 1000 * (i + 1)
            self.register_parameter(name, nn.Parameter(values.to(dtype), requires_grad=False))
        self.loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loader(self, dict(weights))


def hf(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> Weights:
    """Different values in every element of every tensor."""
    out, at = {}, 1
    for name, shape in shapes.items():
        out[name] = torch.arange(at, at + math.prod(shape)).view(shape).to(dtype)
        at += math.prod(shape)
    return out


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in weights.items()
    ]


def raw(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bytes(t.contiguous().flatten().view(torch.uint8).tolist())
        for name, t in describe_tensors(model)[1].items()
    }


def apply(model: nn.Module, recording: Recording, weights: Weights) -> None:
    """Does what was recorded, with as_strided alone."""
    tensors = describe_tensors(model)[1]

    def live(name: str, s: Slice) -> torch.Tensor:
        t = tensors[name]
        return torch.as_strided(t, s.shape, s.stride, t.storage_offset() + s.offset)

    for want in recording.wants:
        src = torch.as_strided(
            weights[want.source], want.src.shape, want.src.stride, want.src.offset
        )
        live(want.param, want.dst).copy_(src)
    for constant in recording.constants:
        live(constant.param, constant.dst).fill_(constant.value)
    if recording.computed:
        pulled = {n: weights[n].clone() for n in sources_in_order(recording, list(weights))}
        replay(model, recording, pulled)
        # They are compared with the trainer's afterwards.
        assert all(torch.equal(t, weights[n]) for n, t in pulled.items())


def record(model: nn.Module, weights: Weights) -> Recording:
    """Records, and proves that the model did not change."""
    before, specs = raw(model), describe_tensors(model)[0]
    try:
        return record_load(model, specs_of(weights))
    finally:
        assert describe_tensors(model)[0] == specs
        assert raw(model) == before


def agree(make: Callable[[], nn.Module], weights: Weights, *, covered: bool = True) -> Recording:
    """The recording, applied, gives bitwise what the loader itself gives."""
    recorded, loaded = make(), make()
    recording = record(recorded, weights)
    apply(recorded, recording, weights)
    with torch.no_grad():
        loaded.load_weights((n, t.clone()) for n, t in weights.items())  # type: ignore[operator]
    assert raw(recorded) == raw(loaded)
    if covered:
        specs = {s.name: s for s in specs_of(weights)}
        # What an engine rank adds for what is computed.
        sources = [specs[n] for n in sources_in_order(recording, list(specs))]
        scratch = [param(scratch_name(s.name), s.shape, s.dtype) for s in sources]
        wants = [copy(to, source) for to, source in zip(scratch, sources, strict=True)]
        one = EngineRankLayout(
            engine_rank(),
            (*describe_tensors(recorded)[0], *scratch),
            replace(recording, wants=(*recording.wants, *wants)),
        )
        # Whether a constant is padding is asked elsewhere.
        assert coverage.check_rank(one, specs, allow_padding=True) == []
    return recording


# What can be followed.


def test_a_plain_copy() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])

    recording = agree(lambda: Model(load, p=(4, 3)), hf(a=(4, 3)))
    whole = Slice(0, (4, 3), (3, 1))
    assert recording == Recording((Want("p", whole, "a", whole),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])

    agree(lambda: Model(load, dtype, p=(4, 3)), hf(dtype, a=(4, 3)))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_tensor_parallel_narrow(rank: int) -> None:
    def load(m: Model, w: Weights) -> None:
        m.col.data.copy_(w["a"].narrow(0, 2 * rank, 2))
        m.row.data.copy_(w["b"].narrow(1, 3 * rank, 3))

    recording = agree(lambda: Model(load, col=(2, 4), row=(4, 3)), hf(a=(6, 4), b=(4, 9)))
    assert recording.wants[0].src == Slice(8 * rank, (2, 4), (4, 1))
    assert recording.wants[1].src == Slice(3 * rank, (4, 3), (9, 1))


def test_fused_qkv_with_bias_and_chunks() -> None:
    def load(m: Model, w: Weights) -> None:
        at = 0
        for name in "qkv":
            n = w[name].shape[0] // 2
            m.qkv.narrow(0, at, n).copy_(w[name].chunk(2)[1])
            m.bias[at : at + n] = w[f"{name}_bias"][n:]
            at += n

    weights = hf(q=(8, 3), k=(4, 3), v=(4, 3), q_bias=(8,), k_bias=(4,), v_bias=(4,))
    recording = agree(lambda: Model(load, qkv=(8, 3), bias=(8,)), weights)
    assert [w.source for w in recording.wants] == ["q", "q_bias", "k", "k_bias", "v", "v_bias"]


def test_experts_into_one_stacked_parameter() -> None:
    def load(m: Model, w: Weights) -> None:
        for e in range(3):
            gate, up = m.w13.data[e].chunk(2, dim=0)
            gate.copy_(w[f"{e}.gate"])
            up.copy_(w[f"{e}.up"])
            m.w2.data[e].copy_(w[f"{e}.down"])

    shapes = {f"{e}.{n}": (2, 4) for e in range(3) for n in ("gate", "up")}
    shapes |= {f"{e}.down": (4, 2) for e in range(3)}
    agree(lambda: Model(load, w13=(3, 4, 4), w2=(3, 4, 2)), hf(**shapes))


def test_transposed_views_on_both_sides() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.t().copy_(w["a"])
        m.q.data.copy_(w["b"].t())
        m.r.data.permute(2, 0, 1).copy_(w["c"])

    agree(lambda: Model(load, p=(3, 4), q=(5, 2), r=(2, 3, 4)), hf(a=(4, 3), b=(2, 5), c=(4, 2, 3)))


def test_views_that_split_and_join_dimensions() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.view(2, 3, 4).copy_(w["a"].view(2, 3, 4))
        m.q.data.flatten().copy_(w["b"].reshape(-1))
        m.r.data.copy_(w["c"].squeeze(1).unflatten(0, (2, 2)))

    agree(lambda: Model(load, p=(6, 4), q=(2, 5), r=(2, 2, 3)), hf(a=(6, 4), b=(5, 2), c=(4, 1, 3)))


def test_broadcasts() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["scale"])
        m.q.data[1].copy_(w["row"].expand(3, 4))
        m.q.data[0] = w["row"]
        m.s.data.copy_(w["scale"].squeeze())

    recording = agree(lambda: Model(load, p=(5,), q=(2, 3, 4), s=(1,)), hf(scale=(1,), row=(4,)))
    assert recording.wants[0].src == Slice(0, (5,), (0,))


def test_constants_for_padding_rows() -> None:
    def load(m: Model, w: Weights) -> None:
        m.embed.data[:4].copy_(w["a"])
        m.embed.data[4:6].fill_(0)
        m.embed.data[6:].zero_()
        m.scale.data.fill_(2.5)
        m.embed.data[8:].fill_(3)  # no rows: recorded as nothing
        m.embed.data[8:].copy_(w["a"][4:])

    recording = agree(lambda: Model(load, embed=(8, 2), scale=(3,)), hf(a=(4, 2)))
    assert recording.constants == (
        Constant("embed", Slice(8, (2, 2), (2, 1)), 0.0),
        Constant("embed", Slice(12, (2, 2), (2, 1)), 0.0),
        Constant("scale", Slice(0, (3,), (1,)), 2.5),
    )


def test_constants_by_assignment() -> None:
    def load(m: Model, w: Weights) -> None:
        m.embed.data[:4].copy_(w["a"])
        m.embed.data[4:] = 0

    agree(lambda: Model(load, embed=(8, 2)), hf(a=(4, 2)))


class Vocabulary(nn.Module):
    """As SGLang's VocabParallelEmbedding: the layer knows how many rows it needs."""

    def __init__(self, rows: int, used: int, added: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 3), requires_grad=False)
        self.shard_indices = SimpleNamespace(num_org_elements=used, num_added_elements=added)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensor = dict(weights)["a"]
        self.weight.data[: len(tensor)].copy_(tensor)
        self.weight.data[len(tensor) :].fill_(0)


@pytest.mark.parametrize(("used", "added", "padding"), [(5, 0, 9), (8, 0, 0), (4, 2, 6)])
def test_padding_of_a_vocabulary_is_known(used: int, added: int, padding: int) -> None:
    class Outer(Model):
        def __init__(self) -> None:
            super().__init__(lambda m, w: m.embed.load_weights(w.items()), p=(1,))
            self.embed = Vocabulary(8, used, added)
            self.other = nn.LayerNorm(2)
            self.other.shard_indices = None  # type: ignore[assignment]

    recording = agree(Outer, hf(a=(used + added, 3)), covered=False)
    assert recording.padding == {"embed.weight": padding}
    filled = sum(c.dst.numel for c in recording.constants)
    assert filled == padding


def test_padding_of_a_bias_is_known() -> None:
    model = Model(lambda m, w: m.head.load_weights(w.items()))
    model.head = Vocabulary(8, 5)
    model.head.bias = nn.Parameter(torch.ones(8), requires_grad=False)
    recording = record_load(model, specs_of(hf(a=(5, 3))))
    assert recording.padding == {"head.weight": 9, "head.bias": 3}


class Tied(nn.Module):
    def __init__(self, load_head: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        nn.init.ones_(self.head.weight)
        self.head.weight = self.embed.weight
        nn.init.constant_(self.embed.weight, 5)
        self.embed.weight.requires_grad_(False)
        self.load_head = load_head

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        target = self.head.weight if self.load_head else self.embed.weight
        target.data.copy_(dict(weights)["embed"])


@pytest.mark.parametrize("load_head", [False, True])
def test_tied_parameters_go_by_their_first_name(load_head: bool) -> None:
    recording = agree(lambda: Tied(load_head), hf(embed=(4, 3)))
    assert [w.param for w in recording.wants] == ["embed.weight"]
    specs, tensors = describe_tensors(Tied(load_head))
    assert [s.name for s in specs] == ["embed.weight", "head.weight"]
    assert specs[0].storage == specs[1].storage
    assert tensors["embed.weight"].data_ptr() == tensors["head.weight"].data_ptr()


def test_parameters_that_are_parts_of_one_storage() -> None:
    def make() -> Model:
        def load(m: Model, w: Weights) -> None:
            m.b.data[1:].copy_(w["b"])
            m.b.data[:1].copy_(w["a"][3:])
            m.a.data.copy_(w["a"])

        m = Model(load)
        flat = torch.arange(24.0)
        m.a = nn.Parameter(flat[:12].view(4, 3), requires_grad=False)
        m.b = nn.Parameter(flat[12:].view(4, 3), requires_grad=False)
        return m

    recording = agree(make, hf(a=(4, 3), b=(3, 3)))
    assert [(w.param, w.dst.offset) for w in recording.wants] == [("b", 3), ("b", 0), ("a", 0)]


def test_buffers_are_live_too() -> None:
    def make() -> Model:
        def load(m: Model, w: Weights) -> None:
            m.bias.copy_(w["bias"])

        m = Model(load)
        m.register_buffer("bias", torch.ones(4))
        m.register_buffer("cache", torch.ones(2))
        return m

    recording = agree(make, hf(bias=(4,)))
    assert [w.param for w in recording.wants] == ["bias"]
    assert [(s.name, s.buffer) for s in describe_tensors(make())[0]] == [
        ("bias", True),
        ("cache", True),
    ]


def test_memory_that_is_no_parameter_may_be_written() -> None:
    seen = []

    def load(m: Model, w: Weights) -> None:
        scratch = torch.zeros(3)
        scratch.add_(1).copy_(torch.tensor([1.0, 2.0, 3.0]))
        seen.append(scratch.tolist())
        m.p.data.copy_(w["a"])

    agree(lambda: Model(load, p=(2, 2)), hf(a=(2, 2)))
    assert seen[0] == [1.0, 2.0, 3.0]


def test_a_lossless_copy_is_left_to_the_planner() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])  # copy_ converts; whether it may is the planner's business

    agree(lambda: Model(load, torch.float32, p=(4,)), hf(torch.bfloat16, a=(4,)))


# What a loader copies on the way is followed: slices of HF tensors.

FOLLOWED: dict[str, Loader] = {
    "cat": lambda m, w: m.p.data.copy_(torch.cat([w["a"][:2], w["b"][2:]])),
    "cat of columns": lambda m, w: m.p.data.copy_(torch.cat([w["a"][:, :1], w["b"][:, 1:]], 1)),
    "cat, then a part": lambda m, w: m.p.data.copy_(torch.cat([w["a"], w["b"]]).narrow(0, 2, 4)),
    "stack": lambda m, w: m.p.data.copy_(torch.stack([w["a"][0], *w["b"][:3]])),
    "reshape": lambda m, w: m.p.data.copy_(w["a"].t().reshape(4, 3)),
    "contiguous": lambda m, w: m.p.data.t().copy_(w["a"].t().contiguous()),
    "index": lambda m, w: m.p.data.copy_(w["a"][torch.tensor([3, 2, 1, 0])]),
    "steps": lambda m, w: m.p.data.copy_(torch.cat([w["a"][::2], w["b"][1::2]])),
    "repeat": lambda m, w: m.p.data.copy_(w["a"][:1].repeat(4, 1)),
    "to the device": lambda m, w: m.p.data.copy_(w["a"].to("cpu")),
    "emptied": lambda m, w: m.p.data.copy_(w["a"].zero_()),
    "partly emptied": lambda m, w: (w["a"][1:3].zero_(), m.p.data.copy_(w["a"])),  # type: ignore[func-returns-value]
    "copied over": lambda m, w: m.p.data.copy_(w["a"].copy_(w["b"])),
    "put together": lambda m, w: m.p.data.copy_(
        torch.empty_like(w["a"]).copy_(torch.cat([w["b"][2:], w["a"][:2]]))
    ),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_copies_on_the_way_are_followed(case: str) -> None:
    recording = agree(lambda: Model(FOLLOWED[case], p=(4, 3)), hf(a=(4, 3), b=(4, 3)))
    assert recording.computed == ()


def test_a_cat_of_slices_is_several_wants() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data[2:].copy_(torch.cat([w["a"], w["b"]]))

    recording = agree(lambda: Model(load, p=(8, 3)), hf(a=(4, 3), b=(2, 3)), covered=False)
    assert [(w.source, w.dst.offset, w.dst.numel) for w in recording.wants] == [
        ("a", 6, 12),
        ("b", 18, 6),
    ]


def test_elements_that_a_loader_emptied_are_no_sign_of_a_small_tensor() -> None:
    # As SGLang does with the bias of GPT-OSS's experts on all ranks but the first.
    recording = agree(
        lambda: Model(lambda m, w: m.p.data.copy_(w["a"].zero_()), p=(4, 3)), hf(a=(4, 3))
    )
    assert recording.constants == (Constant("p", Slice(0, (4, 3), (3, 1)), 0.0),)
    assert recording.padding == {"p": 12}


# What a loader computes is computed by it, of the same HF tensors alone.

COMPUTED: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "cast": (lambda m, w: m.p.data.copy_(w["a"].half()), ("a",)),
    "arithmetic": (lambda m, w: m.p.data.copy_(w["a"] * 2 + 1), ("a",)),
    "two tensors": (lambda m, w: m.p.data.copy_(w["a"] + w["b"]), ("a", "b")),
    "a scale": (lambda m, w: m.p.data.t().copy_((w["a"] * w["b"][:1]).t()), ("a", "b")),
    "other bits": (lambda m, w: m.p.data.copy_(w["a"].view(torch.int32)), ("a",)),
    "partly": (
        lambda m, w: m.p.data.copy_(torch.cat([w["a"][:2], w["b"][:2] + 1])),
        ("a", "b"),
    ),
    "sorted": (lambda m, w: m.p.data.copy_(w["a"].neg().sort(0).values), ("a",)),
    "multiplied in place": (lambda m, w: m.p.data.copy_(w["a"].mul_(2)), ("a",)),
    "added in place": (lambda m, w: m.p.data.copy_(w["a"].add_(w["b"])), ("a", "b")),
}


@pytest.mark.parametrize(
    ("derive", "why"),
    [
        # SGLang 0.5.23, and those before it.
        (
            lambda m: m.plus_one.copy_(m.p.data).add_(1.0),
            "what it wrote into p, aten.add_.Tensor",
        ),
        (lambda m: torch.add(m.p.data, 1.0, out=m.plus_one), "aten.add.out"),
        (
            lambda m: torch.add(m.p.data, 1.0, out=m.plus_one).mul_(2),
            "aten.add.out, aten.mul_.Tensor",
        ),
    ],
)
def test_what_is_derived_of_a_parameter_while_it_is_loaded(
    derive: Callable[[Any], Any], why: str
) -> None:
    # As SGLang's norm of Qwen3.5, which keeps its weight plus one in a buffer.
    def make() -> Model:
        def load(m: Model, w: Weights) -> None:
            for name in w:
                if name == "a":
                    m.p.data.copy_(w["a"])
                    derive(m)
                else:
                    m.q.data.copy_(w["b"])

        m = Model(load, p=(4,), q=(2,))
        m.register_buffer("plus_one", torch.ones(4))
        return m

    recording = agree(make, hf(a=(4,), b=(2,)))
    assert [w.param for w in recording.wants] == ["p", "q"]
    (one,) = recording.computed
    assert (one.sources, one.params) == (("a",), ("plus_one",))
    assert one.why == why


def test_what_is_computed_into_a_place_of_what_the_model_held_is_refused() -> None:
    def load(m: Model, w: Weights) -> None:
        torch.add(m.p.data, 1.0, out=m.q.data)  # before it was loaded
        m.p.data.copy_(w["a"])

    with pytest.raises(RecordError, match=r"q: written in place by aten\.add\.out"):
        record_load(Model(load, p=(4,), q=(4,)), [spec("a", (4,))])


def test_what_is_computed_into_a_place_takes_the_place_of_what_was_copied_there() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])
        torch.add(w["a"], w["b"], out=m.p.data)

    recording = agree(lambda: Model(load, p=(4, 3)), hf(a=(4, 3), b=(4, 3)))
    assert recording.wants == ()
    assert [(one.sources, one.params) for one in recording.computed] == [(("a", "b"), ("p",))]


def test_a_parameter_that_is_changed_after_it_was_copied() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])
        m.p.data.add_(w["b"]).mul_(2)

    recording = agree(lambda: Model(load, p=(4, 3)), hf(a=(4, 3), b=(4, 3)))
    assert recording.wants == ()
    assert [(one.sources, one.params) for one in recording.computed] == [(("a", "b"), ("p",))]


@pytest.mark.parametrize("case", COMPUTED)
def test_what_is_no_slice_is_computed_again(case: str) -> None:
    loader, sources = COMPUTED[case]

    def load(m: Model, w: Weights) -> None:
        if "a" in w:
            loader(m, w)
        if "c" in w:
            m.q.data.copy_(w["c"])

    recording = agree(
        lambda: Model(load, p=(4, 3), q=(2,)), hf(a=(4, 3), b=(4, 3), c=(2,)), covered=False
    )
    (one,) = recording.computed
    assert (one.sources, one.params) == (sources, ("p",))
    assert [w.param for w in recording.wants] == ["q"]


def test_what_is_computed_is_covered_like_everything_else() -> None:
    def load(m: Model, w: Weights) -> None:
        for name, tensor in w.items():
            (m.p if name == "a" else m.q).data.copy_(tensor.float() if name == "a" else tensor)

    make = lambda: Model(load, p=(4, 3), q=(2,))  # noqa: E731
    recording = agree(make, hf(torch.bfloat16, a=(4, 3), b=(2,)))
    assert recording.computed[0].why == "a cast from bfloat16 to float32"
    bare = EngineRankLayout(engine_rank(), tuple(describe_tensors(make())[0]), recording)
    (problem,) = coverage.check_rank(bare, {s.name: s for s in specs_of(hf(a=(4, 3), b=(2,)))})
    assert "p: a goes in, and is not pulled" in problem


def test_tensors_that_are_computed_together_are_one_computation() -> None:
    def load(m: Model, w: Weights) -> None:
        if {"a", "b"} <= w.keys():
            m.p.data.copy_(w["a"] + w["b"])
        if {"b", "c"} <= w.keys():
            m.q.data.copy_(w["b"] + w["c"])
        if "d" in w:
            m.r.data.copy_(w["d"] * 2)

    shapes = dict.fromkeys("abcd", (2,))
    recording = agree(lambda: Model(load, p=(2,), q=(2,), r=(2,)), hf(**shapes))
    assert [(one.sources, one.params) for one in recording.computed] == [
        (("a", "b", "c"), ("p", "q")),
        (("d",), ("r",)),
    ]


def test_a_loader_that_needs_the_others_is_refused() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"] * (1 if "b" in w else 2))
        if "b" in w:
            m.q.data.copy_(w["b"])
        else:
            m.q.data.copy_(w["a"])

    with pytest.raises(RecordError, match=r"given a alone, loads them in another way.*q"):
        record(Model(load, p=(2,), q=(2,)), hf(a=(2,), b=(2,)))


def test_a_loader_that_fails_without_the_others_is_refused() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"] * 2)
        m.q.data.copy_(w["b"])

    with pytest.raises(RecordError, match=r"given a alone, does not load them.*KeyError"):
        record(Model(load, p=(2,), q=(2,)), hf(a=(2,), b=(2,)))


def test_a_replay_writes_nothing_else() -> None:
    rows = [2]

    def load(m: Model, w: Weights) -> None:
        with ThreadPoolExecutor(1) as pool:  # as SGLang's loaders do with what lies on a CPU
            job = pool.submit(lambda: m.p.data[: rows[0]].copy_(w["a"][: rows[0]] * 2))
        job.result()

    model = Model(lambda m, w: m.p.data[:2].copy_(w["a"][:2] * 2), p=(4, 3))
    recording = record(model, hf(a=(4, 3)))
    model.loader = load
    replay(model, recording, hf(a=(4, 3)))
    before = raw(model)
    rows[0] = 3
    with pytest.raises(RecordError, match=r"p: .* another part of it"):
        replay(model, recording, hf(a=(4, 3)))
    assert raw(model) == before
    rows[0] = 0
    with pytest.raises(RecordError, match="did not write"):
        replay(model, recording, hf(a=(4, 3)))


# What is refused: by parameter and by HF tensor.

REFUSED: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "of what was there": (
        lambda m, w: m.p.data.copy_(torch.where(m.p.data > 0, m.p.data, 0.0)),
        ("p:", "no HF tensor"),
    ),
    "derived of another": (lambda m, w: m.p.data.copy_(m.q.data), ("p:", "no HF tensor")),
    "changed by another": (
        lambda m, w: m.p.data.copy_(w["a"]).mul_(m.q.data),
        ("p:", "mul_"),
    ),
    "a part is changed": (
        lambda m, w: (m.p.data.copy_(w["a"]), m.p.data[0].mul_(2)),  # type: ignore[func-returns-value]
        ("p:", "mul_"),
    ),
    "as other bits": (
        lambda m, w: m.p.data.view(torch.int32).copy_(w["a"].view(torch.int32)),
        ("a:", "another dtype"),
    ),
    "not an HF tensor": (lambda m, w: m.p.data.copy_(torch.ones(4, 3)), ("p:", "no HF tensor")),
    "multiplied in place": (lambda m, w: m.p.data.mul_(2), ("p:", "mul_")),
    "added in place": (lambda m, w: m.p.data.add_(w["a"]), ("p:", "add_")),
    "scattered": (
        lambda m, w: m.p.data.index_put_((torch.tensor([0]),), w["a"][0]),
        ("p:", "index_put_"),
    ),
    "random": (lambda m, w: m.p.data.normal_(), ("p:", "normal_")),
    "into scratch": (lambda m, w: torch.empty(4, 3).copy_(w["a"]), ("a:", "no parameter")),
    "wrong shape": (lambda m, w: m.p.data.copy_(w["a"][:3]), ("p[4, 3]", "a[3, 3]")),
    "resized": (lambda m, w: m.p.data.resize_(2, 3), ("p:", "resize_")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_slice_is_refused_by_name(case: str) -> None:
    loader, words = REFUSED[case]
    with pytest.raises(RecordError) as caught:
        record(Model(loader, p=(4, 3), q=(4, 3)), hf(a=(4, 3), b=(4, 3)))
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    for word in words:
        assert word in line


def test_all_refusals_are_listed_together() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.mul_(2)
        m.q.data.copy_(w["b"])
        m.r.data.normal_()

    with pytest.raises(RecordError) as caught:
        record(Model(load, p=(2,), q=(2,), r=(2,)), hf(a=(2,), b=(2,), c=(2,)))
    text = str(caught.value)
    assert "p: " in text
    assert "r: " in text
    assert "q: " not in text
    assert "Model.load_weights does more than copy slices" in text


def test_a_loader_that_raises_is_quoted() -> None:
    def unknown(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])
        dict(m.named_parameters())["model.surprise.weight"]

    def needs_data(m: Model, w: Weights) -> None:
        if w["a"][0, 0].item() > 0:
            m.p.data.copy_(w["a"])

    with pytest.raises(RecordError, match=r"KeyError: 'model\.surprise\.weight'"):
        record(Model(unknown, p=(2, 2)), hf(a=(2, 2)))
    with pytest.raises(RecordError, match="RuntimeError"):
        record(Model(needs_data, p=(2, 2)), hf(a=(2, 2)))


def test_copies_on_another_thread_are_refused() -> None:
    # Dispatch modes belong to a thread: what another one does cannot be seen.
    def load(m: Model, w: Weights) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: m.p.data.copy_(w["a"])).result()

    with pytest.raises(RecordError, match="does not accept"):
        record(Model(load, p=(2, 2)), hf(a=(2, 2)))


def test_recording_twice_gives_the_same() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p.data.copy_(w["a"])

    model = Model(load, p=(2, 2))
    assert record(model, hf(a=(2, 2))) == record(model, hf(a=(2, 2)))


def test_no_false_names_after_temporaries_were_freed() -> None:
    def load(m: Model, w: Weights) -> None:
        for _ in range(50):  # storages come and go; none may be taken for one of w's
            w["b"] * 2
            torch.empty(4, 3, device="meta")
        m.p.data.copy_(torch.empty(4, 3, device="meta"))

    with pytest.raises(RecordError, match="p: its value comes out of"):
        record(Model(load, p=(4, 3)), hf(a=(4, 3), b=(4, 3)))


# Faults that there were.

UNSEEN: dict[str, Loader] = {
    "foreach": lambda m, w: torch._foreach_mul_([m.p.data], 2.0),
    "out": lambda m, w: torch.neg(torch.ones(4, 3), out=m.p.data),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_other_ways_to_write_a_parameter_are_refused(case: str) -> None:
    with pytest.raises(RecordError, match="p:"):
        record(Model(UNSEEN[case], p=(4, 3)), hf(a=(4, 3)))


def test_a_replaced_parameter_is_refused_and_put_back() -> None:
    def load(m: Model, w: Weights) -> None:
        m.p = nn.Parameter(w["a"], requires_grad=False)

    model = Model(load, p=(4, 3))
    kept = model.p
    with pytest.raises(RecordError, match="p"):
        record_load(model, specs_of(hf(a=(4, 3))))
    assert model.p is kept


def test_a_replaced_module_is_refused_and_put_back() -> None:
    def load(m: Model, w: Weights) -> None:
        m.embed = Vocabulary(8, 5)

    model = Model(load)
    model.embed = kept = Vocabulary(8, 5)
    with pytest.raises(RecordError, match="embed"):
        record_load(model, specs_of(hf(a=(5, 3))))
    assert model.embed is kept


def test_dtype_names_round_trip() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64):
        assert recorder.torch_dtype(recorder.dtype_name(dtype)) == dtype
