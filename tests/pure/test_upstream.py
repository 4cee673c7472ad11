from __future__ import annotations

import ast
import dataclasses

import pytest

from sglang_rdt import settings, upstream
from sglang_rdt.upstream import PATCHES, SOURCE_PATCHES, Expectation, Patch, SourcePatch

SOURCE = """
import os

def plain(a, b, *, c=1):
    helper(a)
    return os.path.join(b)

async def later(x):
    return x

class Box:
    kind = 1

    def put(self, item, /, where, *rest, label=None, **more):
        self._items.append(item)
        return Lid

    class Inner:
        def deep(self):
            pass

if True:
    def hidden(a):
        pass
"""


def why(qualname: str, params: tuple[str, ...] = (), mentions: tuple[str, ...] = ()) -> str | None:
    return Expectation(qualname, params, mentions).mismatch(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("qualname", "params", "mentions"),
    [
        ("plain", (), ()),
        ("plain", ("a", "b", "c"), ("helper", "os", "path", "join")),
        ("plain", ("a", "c"), ()),
        ("later", ("x",), ("x",)),
        ("Box", (), ("_items", "append", "Lid")),
        ("Box.put", ("self", "item", "where", "label"), ("Lid", "_items")),
        ("Box.Inner.deep", ("self",), ()),
    ],
)
def test_what_fits(qualname: str, params: tuple[str, ...], mentions: tuple[str, ...]) -> None:
    assert why(qualname, params, mentions) is None


@pytest.mark.parametrize(
    ("qualname", "params", "mentions", "reason"),
    [
        ("missing", (), (), "does not exist"),
        ("Box.missing", (), (), "does not exist"),
        ("Missing.put", (), (), "does not exist"),
        ("put", (), (), "does not exist"),
        ("hidden", (), (), "does not exist"),  # conditional definitions are not patched blindly
        ("plain", ("a", "z"), (), "has no parameter z (it has a, b, c)"),
        ("plain", ("y", "a", "z"), (), "has no parameter y, z (it has a, b, c)"),
        ("plain", ("b", "a"), (), "has its parameters in another order: a, b, c"),
        ("Box.put", ("label", "item"), (), "in another order: self, item, where, label"),
        ("Box", ("item",), (), "is not a function"),
        ("plain", (), ("helper", "gone", "lost"), "does not use gone, lost"),
        ("Box.put", (), ("kind",), "does not use kind"),
        ("plain", (), ("plain",), "does not use plain"),
    ],
)
def test_what_does_not_fit(
    qualname: str, params: tuple[str, ...], mentions: tuple[str, ...], reason: str
) -> None:
    found = why(qualname, params, mentions)
    assert found is not None
    assert reason in found


def test_members_of_a_function_do_not_exist() -> None:
    assert why("plain.put") == "does not exist"


def test_a_patch_reports_its_first_mismatch_with_the_full_name() -> None:
    patch = dataclasses.replace(
        upstream.patch("event_loop"),
        module="some.module",
        expects=(Expectation("plain"), Expectation("gone"), Expectation("lost")),
    )
    assert patch.mismatch(SOURCE) == ("some.module.gone", "does not exist")
    assert dataclasses.replace(patch, expects=(Expectation("plain"),)).mismatch(SOURCE) is None


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_every_patch_says_all_about_itself(patch: Patch) -> None:
    for text in (patch.what, patch.why, patch.upstream, patch.drop_when):
        assert len(text) > 10
    assert patch.expects
    assert isinstance(getattr(settings.Settings(), patch.toggle), bool)
    assert upstream.patch(patch.name) is patch


@pytest.mark.parametrize("patch", SOURCE_PATCHES, ids=lambda p: p.name)
def test_every_patch_of_the_sources_says_all_about_itself(patch: SourcePatch) -> None:
    for text in (patch.what, patch.why, patch.upstream, patch.drop_when, patch.instead):
        assert len(text) > 10
    assert isinstance(getattr(settings.Settings(), patch.toggle), bool)
    assert patch.name not in {p.name for p in PATCHES}
    assert patch.marker not in {p.marker for p in PATCHES}


def test_patches_differ_in_name_and_toggle() -> None:
    for attribute in ("name", "toggle"):
        assert len({getattr(p, attribute) for p in PATCHES}) == len(PATCHES)
    assert len({(p.module, p.marker) for p in PATCHES}) == len(PATCHES)
    with pytest.raises(KeyError):
        upstream.patch("no such patch")
