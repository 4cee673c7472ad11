"""What is derived of weights must be derived again, or be refused."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from sglang_rdt.engine import derived
from sglang_rdt.engine.recorder import record_load
from sglang_rdt.engine.unsound import Unsound
from sglang_rdt.errors import EngineStateError
from sglang_rdt.plan import coverage
from sglang_rdt.plan.selection import keep
from sglang_rdt.plan.specs import Computed, EngineRankLayout, Recording, Want, Write

from .builders import engine_rank, param, rect, spec


class Derives(nn.Module):
    def post_load_weights(self, is_nextn: bool = False) -> None:
        pass


class Inherits(Derives):
    pass


class NextN(Derives):
    def post_load_weights(self, is_nextn: bool = True) -> None:
        pass


def test_models_that_a_session_derives_of_are_fine() -> None:
    outer = Derives()
    outer.language_model = Derives()
    draft = NextN()
    draft.model = nn.Module()
    draft.model.decoder = nn.Linear(2, 2)
    for model in (Derives(), outer, draft, nn.Linear(2, 2)):
        assert derived.problems(model) == []


def test_what_a_session_does_not_derive_is_refused_by_name() -> None:
    wrapper = nn.Module()
    wrapper.language_model = Derives()
    assert derived.problems(wrapper)[0].startswith("language_model derives weights after loading")
    draft = Inherits()
    draft.model = nn.Module()
    draft.model.decoder = nn.Linear(2, 2)
    assert derived.problems(draft)[0].startswith("Inherits inherits post_load_weights")
    replicated = Derives()
    replicated.attn = nn.Module()
    replicated.attn.w_kc_qrep = torch.zeros(1)
    assert derived.problems(replicated)[0].startswith("attn: dcp_replicate_q_proj")


@pytest.mark.parametrize("torn", [None, ["hf.norm"]])
def test_what_is_computed_is_not_kept_where_it_is_torn(torn: list[str] | None) -> None:
    where = rect((4,), (0, 4))
    recording = Recording(
        (Want("a", where, "hf.a", where),),
        computed=(Computed(("hf.norm",), (Write("norm", where),), "a cast"),),
    )
    unsound = Unsound("here")
    unsound.add(torn, "a sync failed", "target")
    with pytest.raises(EngineStateError, match=r"the name filter keeps hf\.norm"):
        unsound.refuse(keep(recording, ["hf.norm"]).kept, "target")


class Nested(nn.Module):
    """A loader inside of a loader, each of which derives at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b, self.w_kc = nn.Parameter(torch.ones(2)), torch.ones(2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.kv_b.data.copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.w_kc.copy_(self.kv_b.data)


def test_recording_derives_nothing_inside_of_a_model_either() -> None:
    outer = Derives()
    outer.language_model = inner = Nested()
    outer.load_weights = inner.load_weights  # type: ignore[assignment]
    inner.kv_b.data = torch.full((2,), 99.0)  # the loadable form: undefined
    record_load(outer, [spec("kv_b", (2,))])
    assert inner.w_kc.tolist() == [1.0, 1.0]
    assert "post_load_weights" not in {**vars(inner), **vars(outer)}


def test_a_loader_that_rounds_on_the_way_is_named() -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.w.data.copy_(tensor.to(torch.bfloat16))

    for dtype, lossy in (("float32", 1), ("bfloat16", 0)):
        w = spec("w", (2,), dtype)
        layout = EngineRankLayout(engine_rank(), (param("w", (2,)),), record_load(Rounds(), [w]))
        problems, _ = coverage.check_dtypes(layout, {"w": w}, allow_cast=False)
        assert len(problems) == lossy
