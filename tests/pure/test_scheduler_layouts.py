"""Which engines are refused before any of their ranks hears of a sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rdt.engine.scheduler_control import SchedulerControl
from sglang_rdt.errors import EngineStateError

from .ranks import Engine

FINE: dict[str, Any] = {"pp_size": 1, "disaggregation_mode": "null"}


def _control(**args: Any) -> SchedulerControl:
    scheduler = SimpleNamespace(server_args=SimpleNamespace(**{**FINE, **args}))
    return SchedulerControl(scheduler, "engine tp0", label_replies=False)


@pytest.mark.parametrize(
    "args",
    [{}, {"pp_size": 4}, {"disaggregation_mode": "decode"}, {"enable_eplb": False}],
    ids=str,
)
def test_what_can_be_synced(args: dict[str, Any]) -> None:
    _control(**args).refuse_unsupported_layout()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"pp_size": 2, "disaggregation_mode": "prefill"}, "pipeline parallelism in a prefill"),
        ({"enable_dp_attention_local_control_broadcast": True}, "local_control_broadcast"),
        ({"enable_eplb": True}, "enable_eplb"),
        ({"elastic_ep_backend": "mooncake"}, "elastic_ep_backend"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_cannot(args: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineStateError, match=f"engine tp0 cannot be synced: it runs .*{why}"):
        _control(**args).refuse_unsupported_layout()


@pytest.mark.usefixtures("empty_inbox")
def test_a_refused_layout_hears_of_no_call() -> None:
    engine = Engine(2)
    try:
        for rank in engine.ranks:
            rank.control.fail["layout"] = EngineStateError("not this one")
        for error in engine.begin("s1"):
            assert "not this one" in str(error)
        assert not any(rank.gate._calls for rank in engine.ranks)
        assert engine.states == ["current", "current"]
        assert [rank.control.log for rank in engine.ranks] == [[], []]
    finally:
        engine.stop()
