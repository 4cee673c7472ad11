from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sglang_rdt.engine.actor_class import FORWARDED, plain_class
from sglang_rdt.engine.sync_request import RankStatus, SyncRequest
from sglang_rdt.errors import PatchMismatchError


class Plain:
    limit = 3

    def get_info(self) -> None: ...

    def run_event_loop(self) -> None: ...

    def _private(self) -> None: ...


def test_the_class_behind_a_real_actor_class() -> None:
    # Ray subclasses the user's class; nothing is started by this.
    assert plain_class(ray.remote(Plain)) is Plain
    assert {"get_info", "run_event_loop"} == FORWARDED


class More(Plain):
    def get_info(self) -> None: ...

    def run_event_loop(self) -> None: ...

    def shutdown(self) -> None: ...


class Less:
    def get_info(self) -> None: ...


@pytest.mark.parametrize(("cls", "found"), [(More, "shutdown"), (Less, "['get_info'], expected")])
def test_other_methods_are_refused(cls: type, found: str) -> None:
    with pytest.raises(PatchMismatchError) as caught:
        plain_class(ray.remote(cls))
    assert found in str(caught.value)
    assert "SGLANG_RDT_PATCH_SCHEDULER_ACTOR=0" in str(caught.value)


@pytest.mark.parametrize(
    "thing", [Plain, None, SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Plain))]
)
def test_what_is_no_actor_class_is_refused(thing: Any) -> None:
    with pytest.raises(PatchMismatchError, match="not a Ray actor class of the known form"):
        plain_class(thing)


def test_requests_and_status_are_plain_data() -> None:
    request = SyncRequest("s1", "host:1", "sync")
    assert pickle.loads(pickle.dumps(request)) == request
    status = RankStatus(state="dirty", detail="x", extra={"threads": 3})
    assert pickle.loads(pickle.dumps(status)) == status
    assert RankStatus().extra is not RankStatus().extra
