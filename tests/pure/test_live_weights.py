from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sglang_rdt import checksum
from sglang_rdt.engine import live_weights
from sglang_rdt.engine.live_weights import LiveWeights
from sglang_rdt.errors import EngineStateError, RecordError, SlicesError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.buckets import Target
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import EngineRankLayout, TensorSpec

from .builders import engine_rank, rect

SPECS = [TensorSpec("w", (6, 2), "float32"), TensorSpec("b", (3,), "float32")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(24.0).view(6, 4), requires_grad=False)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3))

    def load_weights(self, weights: Any) -> None:
        named = dict(weights)
        self.w.data[:, 1:3].copy_(named["w"])
        self.w.data[:, 0].fill_(1)
        self.w.data[:, 3].zero_()
        self.bias.copy_(named["b"])


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> LiveWeights:
    def pull(ref: list[torch.Tensor], targets: list[torch.Tensor], timeout_s: float) -> None:
        for value, target in zip(ref, targets, strict=True):
            assert target.is_contiguous()
            assert target.shape == value.shape
            target.copy_(value)

    monkeypatch.setattr(live_weights.nixl, "pull", pull)
    # The real ones start Ray.
    monkeypatch.setattr(live_weights.nixl, "register", lambda tensors: len(list(tensors)))
    monkeypatch.setattr(live_weights.nixl, "deregister", lambda tensors: None)
    made = LiveWeights(Model(), "engine tp0")
    made.record(SPECS)
    return made


def model_of(weights: LiveWeights) -> Model:
    model = weights._model
    assert isinstance(model, Model)
    return model


def columns(low: int, high: int) -> Target:
    return Target("w", rect((6, 4), (0, 6), (low, high)), "float32", 0)


def test_whole_parameters_and_slices_are_pulled_in_place(weights: LiveWeights) -> None:
    model = model_of(weights)
    address = model.w.data_ptr()
    new = torch.arange(12.0).view(6, 2) + 100
    expected = model.w.clone()
    expected[:, 1:3] = new
    # A strided slice goes through scratch memory, a contiguous one does not; both arrive.
    moved = weights.pull([new, torch.tensor([5.0, 6.0, 7.0])], [columns(1, 3), "bias"], 1.0)
    assert moved == 60
    assert torch.equal(model.w, expected)
    assert model.bias.tolist() == [5, 6, 7]
    assert model.w.data_ptr() == address


def test_comparing_changes_nothing_and_counts_bytes(weights: LiveWeights) -> None:
    model = model_of(weights)
    before = model.w.clone()
    same = model.w[:, 1:3].clone()
    assert weights.compare([same, model.bias.clone()], [columns(1, 3), "bias"], 1.0) == []
    same[2, 1] = -same[2, 1]  # one bit in one byte
    (line,) = weights.compare([same], [columns(1, 3)], 1.0)
    assert line == "engine tp0: w at element 1: 1 of 48 bytes differ"
    assert torch.equal(model.w, before)


def test_comparing_notices_a_pull_that_brought_nothing(
    weights: LiveWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_weights.nixl, "pull", lambda ref, targets, timeout_s: None)
    (line,) = weights.compare([None], ["w"], 1.0)
    assert line.startswith("engine tp0: w: ")


def test_constants_are_applied_where_the_loader_puts_them(weights: LiveWeights) -> None:
    model = model_of(weights)
    middle = model.w[:, 1:3].clone()
    weights.apply_constants()
    assert model.w[:, 0].tolist() == [1] * 6
    assert model.w[:, 3].tolist() == [0] * 6
    assert torch.equal(model.w[:, 1:3], middle)


def test_checksums_cover_what_the_loader_fills(weights: LiveWeights) -> None:
    model = model_of(weights)
    sums = weights.checksums()
    assert sums == {
        "w": checksum.slice_sum(model.w[:, 1:3], 1),
        "bias": checksum.slice_sum(model.bias, 0),
    }
    model.w[:, 0] = 9  # a constant's place
    assert weights.checksums() == sums
    model.w[5, 2] = 9
    assert weights.checksums() != sums


def test_checksums_need_a_recording() -> None:
    with pytest.raises(EngineStateError, match="engine tp0: no load was recorded"):
        LiveWeights(Model(), "engine tp0").checksums()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nothing", "engine tp0 has no parameter 'nothing'"),
        (Target("nothing", rect((1,)), "float32", 0), "engine tp0 has no parameter 'nothing'"),
        (Target("w", Slice(20, (5,), (1,)), "float32", 0), "engine tp0: w: .*element 24"),
        (Target("w", Slice(0, (4,), (-1,)), "float32", 0), "negative"),
        (Target("w", rect((6, 4)), "float16", 0), "w is float32, not float16"),
    ],
)
def test_nothing_is_resolved_to_memory_elsewhere(weights: LiveWeights, what: Any, why: str) -> None:
    with pytest.raises(SlicesError, match=why):
        weights.resolve(["w", what])


def test_parts_of_a_larger_storage_stay_inside_of_their_part() -> None:
    model = Model()
    flat = torch.zeros(20)
    model.w = nn.Parameter(flat[4:12].view(2, 4), requires_grad=False)
    weights = LiveWeights(model, "engine tp0")
    weights.view("w", Slice(0, (8,), (1,))).fill_(1)
    assert flat.tolist() == [0.0] * 4 + [1.0] * 8 + [0.0] * 8
    with pytest.raises(SlicesError):
        weights.view("w", Slice(0, (9,), (1,)))


def test_addresses(weights: LiveWeights) -> None:
    model = model_of(weights)
    weights.check_addresses()
    model.w.data.fill_(3)  # new values are no new place
    model.cache = torch.zeros(5)  # type: ignore[assignment]
    weights.check_addresses()
    model.w = nn.Parameter(model.w.clone(), requires_grad=False)
    with pytest.raises(EngineStateError, match=r"1 parameters moved .* \(w\); connect again"):
        weights.check_addresses()


def test_added_parameters_are_noticed(weights: LiveWeights) -> None:
    model_of(weights).extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(EngineStateError):
        weights.check_addresses()


# Faults that there were.


def test_connecting_again_follows_moved_parameters(weights: LiveWeights) -> None:
    model = model_of(weights)
    model.w = nn.Parameter(model.w.clone(), requires_grad=False)
    with pytest.raises(EngineStateError, match="connect again"):
        weights.check_addresses()
    weights.record(SPECS)
    weights.check_addresses()
    assert weights.view("w", rect((6, 4))).data_ptr() == model.w.data_ptr()


def test_a_moved_buffer_that_the_loader_fills_is_noticed(weights: LiveWeights) -> None:
    model_of(weights).bias = torch.zeros(3)  # type: ignore[assignment]
    with pytest.raises(EngineStateError, match="bias"):
        weights.check_addresses()


def test_a_parameter_without_dimensions_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        live_weights.nixl, "pull", lambda ref, targets, timeout_s: targets[0].copy_(ref[0])
    )
    monkeypatch.setattr(live_weights.nixl, "register", lambda tensors: 0)
    monkeypatch.setattr(live_weights.nixl, "deregister", lambda tensors: None)
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
    weights = LiveWeights(model, "engine tp0")
    assert weights.compare([torch.tensor(2.0)], ["scale"], 1.0) == []


class Norm(nn.Module):
    """Keeps its weight, and its weight plus one in a buffer, as SGLang's norm of Qwen3.5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("plus_one", torch.ones(4))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "w":
                self.weight.data.copy_(tensor)
                self.plus_one.copy_(self.weight.data).add_(1.0)
            else:
                self.bias.data.copy_(tensor)


NORM_SPECS = [TensorSpec("w", (4,), "float32"), TensorSpec("b", (2,), "float32")]


@pytest.fixture
def norm(weights: LiveWeights) -> LiveWeights:
    made = LiveWeights(Norm(), "engine tp0")
    made.record(NORM_SPECS)
    return made


def test_what_is_computed_is_pulled_whole_and_computed_by_the_loader(norm: LiveWeights) -> None:
    model = norm._model
    assert isinstance(model, Norm)
    described = {s.name: s for s in norm.describe()}
    assert described.keys() == {"weight", "bias", "plus_one", "computed:w"}
    assert (described["computed:w"].shape, described["computed:w"].dtype) == ((4,), "float32")
    assert norm.recording is not None
    layout = EngineRankLayout(engine_rank(), tuple(norm.describe()), norm.recording)
    assert coverage.check_rank(layout, {s.name: s for s in NORM_SPECS}) == []
    # Everything that a sync fills is overwritten where a test wants to see that it does.
    norm.overwrite()
    assert model.plus_one.isnan().all() or (model.plus_one != 1).all()
    new, bias = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    norm.check_addresses()
    norm.pull([new, bias, new], ["weight", "bias", "computed:w"], 1.0)
    norm.compute()
    assert model.plus_one.tolist() == [2, 3, 4, 5]
    assert model.weight.tolist() == [1, 2, 3, 4]
    # What was pulled there is still there, to be compared with the trainer's.
    expected = norm.checksums()
    assert expected["computed:w"] == expected["weight"]
    assert norm.compare([new], ["computed:w"], 1.0) == []
    norm.overwrite()
    norm.pull([new, bias, new], ["weight", "bias", "computed:w"], 1.0)
    norm.compute()
    assert model.plus_one.tolist() == [2, 3, 4, 5]


def test_scratch_of_a_recording_goes_with_it(norm: LiveWeights) -> None:
    norm._model.load_weights = lambda weights: None  # type: ignore[assignment]
    norm.record([])
    assert [s.name for s in norm.describe()] == ["weight", "bias", "plus_one"]
    norm.compute()  # nothing
    with pytest.raises(SlicesError, match="computed:w"):
        norm.pull([torch.ones(4)], ["computed:w"], 1.0)


def test_a_loader_that_does_something_else_in_a_sync_is_an_error(norm: LiveWeights) -> None:
    norm._model.load_weights = lambda weights: list(weights)  # type: ignore[assignment]
    with pytest.raises(RecordError, match="plus_one"):
        norm.compute()


def test_what_a_filter_keeps_is_left_alone(weights: LiveWeights) -> None:
    model = model_of(weights)
    model.w.data.copy_(torch.arange(24.0).view(6, 4))
    before = model.w.clone()
    recording = weights.record(SPECS, ["w"])
    assert {w.param for w in recording.wants} == {"bias"}
    assert weights.overwrite() == 12
    weights.apply_constants()
    assert torch.equal(model.w, before)
    assert not torch.equal(model.bias, torch.zeros(3))
    assert set(weights.checksums()) == {"bias"}
    # The other way round, its constants are set.
    weights.record(SPECS, ["b"])
    bias = model.bias.clone()
    assert weights.overwrite() == 48
    weights.apply_constants()
    assert set(weights.checksums()) == {"w"}
    assert torch.equal(model.w[:, 0], torch.ones(6))
    assert torch.equal(model.w[:, 3], torch.zeros(6))
    assert torch.equal(model.bias, bias)
