from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from sglang_rdt import errors
from sglang_rdt.coordinator.calls import CallFailures
from sglang_rdt.errors import RdtError, listed

MADE = [
    errors.TrainerLostError("rank 1 is gone"),
    RdtError("plain"),
    errors.SettingError("SGLANG_RDT", "x", "expected a flag"),
    errors.UnsupportedVersionError("sglang", "9.9", "0.5.16 to 0.5.23"),
    errors.PatchMismatchError("event_loop", "a.b", "does not exist", "SGLANG_RDT_PATCH_EVENT_LOOP"),
    errors.EngineNotFoundError("none"),
    errors.AmbiguousEngineError("two"),
    errors.NotRayBackendError("no actors"),
    errors.DeadlineError("engine 1", "pull", 1.5),
    errors.EngineStateError("in a sync"),
    errors.ReconnectError("forgot you"),
    errors.AnotherRankError("engine 1: another rank refused"),
    errors.EngineBusyError("3 running"),
    errors.RecordError("cat"),
    errors.PlanError("do not fit", ["a", "b"]),
    errors.SlicesError("outside"),
    errors.PlacementError("text"),
    errors.TransportError("link"),
    errors.ExportError("more than announced"),
    errors.VerifyError("differ", ["x", "y"]),
    errors.SyncError("v1", {"e1": "dead", "e0": "late"}),
    CallFailures("begin", {"rank 0": errors.EngineStateError("busy")}),
]


def test_every_class_is_here() -> None:
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RdtError)}
    assert classes | {CallFailures} == {type(e) for e in MADE}


@pytest.mark.parametrize("error", MADE, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling_keeps_type_text_and_attributes(error: RdtError, protocol: int) -> None:
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert {k: str(v) for k, v in vars(again).items()} == {
            k: str(v) for k, v in vars(error).items()
        }
        assert isinstance(again, RuntimeError)


def test_notes_and_added_attributes_travel_too() -> None:
    error = errors.DeadlineError("engine 1", "pull", 1.5)
    error.add_note("while syncing")
    again = pickle.loads(pickle.dumps(error))
    assert again.__notes__ == ["while syncing"]
    assert (again.who, again.phase, again.seconds) == ("engine 1", "pull", 1.5)


def test_subclasses_with_their_own_constructor_pickle() -> None:
    again = pickle.loads(pickle.dumps(Odd(code=7)))
    assert (type(again), again.code, str(again)) == (Odd, 7, "code 7")


class Odd(RdtError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_messages_say_what_to_do() -> None:
    by_type = {type(e): str(e) for e in MADE}
    assert by_type[errors.UnsupportedVersionError] == (
        "sglang-rdt supports sglang 0.5.16 to 0.5.23; 9.9 is installed. Install a supported sglang, or "
        "set SGLANG_RDT=0 to run without weight sync."
    )
    assert "set SGLANG_RDT_PATCH_EVENT_LOOP=0" in by_type[errors.PatchMismatchError]
    assert by_type[errors.DeadlineError] == "engine 1 did not finish 'pull' within 1.5 s"
    assert by_type[errors.SyncError] == (
        "weight sync to version 'v1' failed on 2 engine(s):\n  - e0: late\n  - e1: dead"
    )
    assert by_type[CallFailures] == "begin failed: rank 0: busy"


def test_lists_are_cut_with_a_count_but_attributes_are_whole() -> None:
    assert listed([1, 2]) == "  - 1\n  - 2"
    assert listed(range(5), 3) == "  - 0\n  - 1\n  - 2\n  ... and 2 more"
    assert listed([]) == ""
    error = errors.PlanError("t", [f"p{i}" for i in range(250)])
    assert "... and 50 more" in str(error)
    assert len(error.problems) == 250


def test_mutable_arguments_are_copied() -> None:
    failures = {"e": "dead"}
    error = errors.SyncError("v", failures)
    failures.clear()
    assert error.failures == {"e": "dead"}
