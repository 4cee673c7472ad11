from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rdt.final_params import make_final
from sglang_rdt.errors import ExportError


class Chunk:
    def __init__(self, log: list[Any], **config: bool) -> None:
        self.log = log
        self.ddp_config = SimpleNamespace(**config)

    def start_param_sync(self, *, force_sync: bool) -> None:
        self.log.append(("sync", self, force_sync))


LAGS = {"use_distributed_optimizer": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_distributed_optimizer": True},
        {"overlap_param_gather": True},
        {"use_distributed_optimizer": True, "overlap_param_gather": False},
        {"use_distributed_optimizer": False, "overlap_param_gather": True},
    ],
)
def test_nothing_to_force(config: dict[str, bool]) -> None:
    log: list[Any] = []
    assert (
        make_final([Chunk(log, **config), object(), SimpleNamespace(ddp_config=None)], None)
        is False
    )
    assert log == []


def test_every_lagging_chunk_is_forced_and_no_other() -> None:
    log: list[Any] = []
    one, still, two = Chunk(log, **LAGS), Chunk(log), Chunk(log, **LAGS)
    assert make_final([one, still, two], None) is True
    assert log == [("sync", one, True), ("sync", two, True)]


def test_the_optimizer_prepares_first() -> None:
    log: list[Any] = []
    optimizer = SimpleNamespace(prepare_model_params_for_param_sync=lambda: log.append("prepare"))
    chunk = Chunk(log, **LAGS, reuse_grad_buf_for_mxfp8_param_ag=True)
    assert make_final([chunk], optimizer) is True
    assert log == ["prepare", ("sync", chunk, True)]


@pytest.mark.parametrize("optimizer", [None, object()])
def test_parameters_in_the_gradient_buffer_are_refused(optimizer: Any) -> None:
    log: list[Any] = []
    chunk = Chunk(log, **LAGS, reuse_grad_buf_for_mxfp8_param_ag=True)
    with pytest.raises(ExportError, match="mxfp8"):
        make_final([Chunk(log, **LAGS), chunk], optimizer)
    assert log == []


def test_no_chunks() -> None:
    assert make_final([], None) is False
