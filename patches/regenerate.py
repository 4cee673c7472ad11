#!/usr/bin/env python3
"""Writes the patch files of one release, from the unpacked sources of that release.

    python patches/regenerate.py TREE VERSION [--check]

TREE holds ``sglang/`` or ``megatron/`` (an unpacked wheel, a site-packages folder, or a source
checkout); VERSION is the release, for example 0.5.23. The files go to
``patches/<package>/<VERSION>/``. ``--check`` writes nothing and fails where a file would change.

Every edit is described once, in PATCHES, by the line that it goes next to (and once more for older
releases that have the line elsewhere). An anchor must occur exactly once in the file, so a release
that moved it is refused, not patched in the wrong place.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Set beside each hook: the monkey-patch steps aside where it sees it. It comes before the import
# of the package, because that import runs the monkey-patch's hooks on the half-imported module.
MARKER = "_SGLANG_RDT_PATCHED"
# A second patch of one file has a marker of its own.
DP_MARKER = f"{MARKER}_DP"
PLACEMENT_MARKER = f"{MARKER}_PLACEMENT"
ARGUMENT_MARKER = f"{MARKER}_ARGUMENT"

VERSIONS: dict[str, tuple[str, ...]] = {
    "sglang": ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    "megatron-core": ("0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"),
}
# The package that a version belongs to is the one whose folder the tree has.
FOLDERS = {"sglang": "sglang", "megatron-core": "megatron/core"}


@dataclass(frozen=True)
class Edit:
    """Adds ``lines`` after (or ``before``) the only line that equals ``anchor``.

    Without an anchor, at the end of the file.
    """

    anchor: str | None
    lines: tuple[str, ...]
    before: bool = False

    def apply(self, source: list[str]) -> list[str]:
        """``source`` with the lines added.

        Raises:
            ValueError: the anchor does not occur exactly once.
        """
        if self.anchor is None:
            at = len(source)
        else:
            found = [i for i, line in enumerate(source) if line == self.anchor]
            if len(found) != 1:
                raise ValueError(f"{self.anchor!r} occurs {len(found)} times, not once")
            at = found[0] if self.before else found[0] + 1
        return [*source[:at], *self.lines, *source[at:]]


@dataclass(frozen=True)
class Older:
    """What a patch is in releases up to ``until``: upstream has moved or rewritten its lines since."""

    until: str
    path: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Patch:
    """One concern: one file of the package, and what stands in the patch's header.

    ``name`` is the name of the same patch in ``sglang_rdt/upstream.py``. ``path`` and ``edits`` are
    those of the newest releases, ``older`` those of others, oldest first; :meth:`at` chooses.
    """

    package: str
    number: int
    name: str
    path: str
    what: str
    why: str
    upstream: str
    drop_when: str
    edits: tuple[Edit, ...]
    marker: str = MARKER
    older: tuple[Older, ...] = ()

    def at(self, version: str) -> Patch:
        """This patch with the path and the edits that it has in ``version``."""
        for older in self.older:
            if _numbers(version) <= _numbers(older.until):
                return dataclasses.replace(self, path=older.path, edits=older.edits, older=())
        return dataclasses.replace(self, older=())

    @property
    def filename(self) -> str:
        return f"{self.number:04d}-{self.name.replace('_', '-')}.patch"

    def header(self, version: str) -> str:
        supported = VERSIONS[self.package]
        return (
            f"What: {self.what}\n"
            f"Why: {self.why}\n"
            f"Upstream: {self.upstream}\n"
            f"Versions: {self.package} {supported[0]} to {supported[-1]}; this file: {version}\n"
            f"Drop when: {self.drop_when}\n"
            "\n"
        )

    def render(self, source: str, version: str) -> str:
        """The patch file for a release whose file at ``path`` is ``source``.

        Raises:
            ValueError: ``source`` is patched already, or an anchor is not there once.
        """
        if MARKER in source:
            raise ValueError(f"{self.path} is patched already; give an untouched tree")
        if not source.endswith("\n"):
            raise ValueError(f"{self.path} does not end with a newline")
        before = source.split("\n")[:-1]
        after = before
        for edit in self.edits:
            try:
                after = edit.apply(after)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
        diff = difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}", lineterm="")
        return self.header(version) + "\n".join(diff) + "\n"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _argument_edits(marker_beside: Edit, field: tuple[str, ...]) -> tuple[Edit, ...]:
    """A marker, and a field of the server arguments before the port that it belongs to."""
    return (
        marker_beside,
        Edit("    engine_info_bootstrap_port: A[", field, before=True),
    )


_ARGUMENT = "    enable_engine_info_bootstrap: A["
_ARGUMENT_HELP = '"Serve how each rank is parallel, over HTTP; for --use-ray."'
_AFTER_LOGGER = Edit("logger = logging.getLogger(__name__)", ("", f"{ARGUMENT_MARKER} = True"))
# A dataclass there: by keyword only, so that no positional argument moves.
_KEYWORD_ONLY = "    ] = dataclasses.field(default=False, kw_only=True)"

PATCHES: tuple[Patch, ...] = (
    Patch(
        package="sglang",
        number=1,
        name="scheduler_actor",
        path="sglang/srt/ray/engine.py",
        what="RayEngine launches a subclass of SchedulerActor: stable name, weight-sync methods.",
        why="the released actor cannot be found by name, cannot be called while its event loop "
        "runs, and has no pull_weights.",
        upstream="sgl-project/sglang#27723 (on a fork branch only)",
        drop_when="a released SGLang has SchedulerActor.pull_weights and discoverable actor names.",
        edits=(
            Edit(
                "logger = logging.getLogger(__name__)",
                (
                    "",
                    f"{MARKER} = True",
                    "from sglang_rdt.engine.hooks import"
                    " scheduler_actor_class as _rdt_scheduler_actor_class",
                    "",
                    "SchedulerActor = _rdt_scheduler_actor_class(SchedulerActor)",
                ),
            ),
        ),
    ),
    Patch(
        package="sglang",
        number=2,
        name="event_loop",
        path="sglang/srt/managers/scheduler_components/request_receiver.py",
        what="the receiver of requests adds this process's waiting weight-sync calls.",
        why="weights may only move on the event-loop thread, on all TP ranks in the same turn; "
        "SGLang's own broadcast carries the calls there.",
        upstream="sgl-project/sglang#27723 (pulls on an actor thread instead)",
        drop_when="SGLang can run a callable on the event loop of every rank under Ray.",
        edits=(
            Edit(
                "if TYPE_CHECKING:",
                (
                    f"{MARKER} = True",
                    "from sglang_rdt.engine.loop_inbox import"
                    " add_loop_calls as _rdt_add_loop_calls",
                    "",
                ),
                before=True,
            ),
            Edit(
                "        recv_reqs = self._pull_raw_reqs()",
                ("        recv_reqs = _rdt_add_loop_calls(recv_reqs)",),
            ),
        ),
    ),
    Patch(
        package="sglang",
        number=3,
        name="weight_version",
        path="sglang/srt/managers/tokenizer_manager.py",
        what="the tokenizer manager follows the weight version that the schedulers report.",
        why="the schedulers know when new weights are complete, but replies and /get_model_info "
        "are labelled by the tokenizer manager, in another process.",
        upstream="sgl-project/sglang#27723 (the trainer calls the HTTP endpoint instead)",
        drop_when="the tokenizer manager takes its weight version from the schedulers.",
        edits=(
            Edit(
                "from sglang.utils import TypeBasedDispatcher, get_exception_traceback",
                (
                    "",
                    f"{MARKER} = True",
                    "from sglang_rdt.engine.hooks import"
                    " follow_weight_version as _rdt_follow_weight_version",
                ),
            ),
            # The last line of init_request_dispatcher, after init_communicators has added its own.
            Edit(
                "        self.signal_handler_class = SignalHandler",
                ("        _rdt_follow_weight_version(self)",),
            ),
        ),
    ),
    Patch(
        package="sglang",
        number=4,
        name="dp_controller",
        path="sglang/srt/ray/engine.py",
        what="RayEngine gives its data-parallel controller a copy of the server arguments.",
        why="0.5.20 to 0.5.23 declare an address on the arguments that the engine has published "
        "already, which SGLang itself refuses: dp_size above 1 cannot start. Older releases copy; "
        "there the call returns what it got.",
        upstream="no issue found (0.5.23 is the newest release)",
        drop_when="the supported releases start a RayEngine with dp_size=2.",
        edits=(
            Edit(
                "class RayEngine(Engine):",
                (
                    f"{DP_MARKER} = True",
                    "from sglang_rdt.engine.hooks import dp_server_args as _rdt_dp_server_args",
                    "",
                    "",
                ),
                before=True,
            ),
            Edit(
                '        """Launch DP schedulers via RayDataParallelController."""',
                (
                    "        server_args = _rdt_dp_server_args(server_args, port_args, rank0_node_ip)",
                ),
            ),
        ),
        marker=DP_MARKER,
    ),
    Patch(
        package="sglang",
        number=5,
        name="placement",
        path="sglang/srt/ray/engine.py",
        what="RayEngine starts its ranks on bundles that are reserved already, and nothing on other "
        "nodes than the first; it can serve engine info, and ends only what it has started.",
        why="without the keyword it makes a second group, or waits for ever on the calling actor's; "
        "every node of a multi-node engine starts all ranks; shutdown kills all children of its process.",
        upstream="sgl-project/sglang#24667, sgl-project/sglang#27723, sgl-project/sglang#20907",
        drop_when="RayEngine and --use-ray take the group and bundles of the calling actor, and clean up.",
        edits=(
            Edit(
                "def _find_engine_bundle(",
                (
                    f"{PLACEMENT_MARKER} = True",
                    "from sglang_rdt.engine.placement import in_class_body as _rdt_placement",
                    "",
                    "",
                ),
                before=True,
            ),
            Edit(
                "    def __init__(self, **kwargs):",
                ("    _rdt_placed = _rdt_placement(globals())", ""),
                before=True,
            ),
        ),
        marker=PLACEMENT_MARKER,
    ),
    Patch(
        package="sglang",
        number=6,
        name="engine_info_argument",
        path="sglang/srt/arg_groups/fields/model.py",
        what="the server argument --enable-engine-info-bootstrap, which 0005 reads.",
        why="released SGLang refuses the argument, so who cannot set SGLANG_RDT_ENGINE_INFO, nor pass "
        "RayEngine its keyword, cannot ask for engine info.",
        upstream="sgl-project/sglang#27723 (on a fork branch only), sgl-project/sglang#20907 (no "
        "argument: always with the transfer engine)",
        drop_when="ServerArgs has enable_engine_info_bootstrap.",
        edits=_argument_edits(
            Edit(
                "class Model(msgspec.Struct):", (f"{ARGUMENT_MARKER} = True", "", ""), before=True
            ),
            # Fields that SGLang's field_order.py does not list come last: no positional one moves.
            (_ARGUMENT, f"        bool, {_ARGUMENT_HELP}", "    ] = False"),
        ),
        marker=ARGUMENT_MARKER,
        older=(
            Older(
                "0.5.16",
                "sglang/srt/server_args.py",
                _argument_edits(
                    _AFTER_LOGGER,
                    (_ARGUMENT, f"        bool, {_ARGUMENT_HELP}", _KEYWORD_ONLY),
                ),
            ),
            Older(
                "0.5.19",
                "sglang/srt/server_args.py",
                _argument_edits(
                    _AFTER_LOGGER,
                    (_ARGUMENT, f'        bool, {_ARGUMENT_HELP}, NS("model")', _KEYWORD_ONLY),
                ),
            ),
        ),
    ),
    Patch(
        package="sglang",
        number=7,
        name="quantised_weights",
        path="sglang/srt/layers/quantization/fp8.py",
        what="the FP8 methods note what a layer's weights looked like before they were quantised, and "
        "quantise new ones into the served parameters.",
        why="quantising loses the loadable parameters, and the pass that every weight-update session "
        "ends with would quantise what is quantised.",
        upstream="sgl-project/sglang#7421 and sgl-project/sglang#30761 (both closed); from 0.5.21 on there is "
        "restore_weights_before_loading, not for FP8",
        drop_when="Fp8LinearMethod and Fp8MoEMethod have restore_weights_before_loading.",
        edits=(
            Edit(
                None,
                (
                    "",
                    "",
                    f"{MARKER} = True",
                    "from sglang_rdt.engine.quantised import instrument as _rdt_quantised  # noqa: E402",
                    "",
                    "_rdt_quantised(globals())",
                ),
            ),
        ),
    ),
    Patch(
        package="megatron-core",
        number=1,
        name="optimizer_step",
        path="megatron/core/optimizer/optimizer.py",
        what="the outermost optimizer's step() tells listeners after a successful step.",
        why="weights are exported when the parameters are final, on all ranks together, without "
        "an edit to the training loop.",
        upstream="radixark/miles#1313 (calls its updater from its own training loop)",
        drop_when="Megatron-core has post-step hooks that see final parameters.",
        edits=(
            Edit(
                None,
                (
                    "",
                    "",
                    f"{MARKER} = True",
                    "from megatron_rdt.hooks import"
                    " instrument_optimizers as _rdt_instrument_optimizers",
                    "",
                    "_rdt_instrument_optimizers(globals())",
                ),
            ),
        ),
    ),
)


def find_root(tree: Path) -> tuple[str, Path]:
    """The package in ``tree`` and the folder that the patches' paths are relative to.

    Raises:
        ValueError: there is no package in ``tree``, or both are.
    """
    found = [
        (package, root)
        for root in (tree, tree / "python")
        for package, folder in FOLDERS.items()
        if (root / folder).is_dir()
    ]
    if len(found) != 1:
        names = " and ".join(package for package, _ in found) or "no sglang/ and no megatron/core/"
        raise ValueError(f"{tree} holds {names}; one package is expected")
    return found[0]


def render_all(tree: Path, version: str) -> Iterator[tuple[Path, str]]:
    """(file, contents) of every patch file for ``version``, made from ``tree``."""
    package, root = find_root(tree)
    for patch in (p.at(version) for p in PATCHES):
        if patch.package == package:
            source = (root / patch.path).read_bytes().decode()
            yield Path(package, version, patch.filename), patch.render(source, version)


def main(argv: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (this one)")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"\d+(\.\d+)*", args.version):
        parser.error(f"{args.version!r} is not the version of a release")
    try:
        rendered = list(render_all(args.tree, args.version))
    except (OSError, ValueError) as error:
        print(f"regenerate: {error}", file=sys.stderr)
        return 1
    stale = 0
    for relative, text in rendered:
        path = args.out / relative
        if args.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                print(f"{path} is not what {args.tree} gives")
                stale += 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
