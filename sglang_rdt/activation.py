"""Switches the patches on: one post-import hook per patched module.

Order does not matter: a module that is imported already is patched at once, one that comes
later when it comes. Nothing heavy is imported here.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

from sglang_rdt import settings as settings_module
from sglang_rdt.errors import PatchMismatchError, RdtError, UnsupportedVersionError
from sglang_rdt.upstream import MEGATRON_VERSIONS, PATCHES, SGLANG_VERSIONS, Patch
from sglang_rdt.versions import in_range, range_text

logger = logging.getLogger("sglang_rdt")

_RANGES = {"sglang": SGLANG_VERSIONS, "megatron-core": MEGATRON_VERSIONS}
_lock = threading.Lock()
_inside = threading.local()
_activated = False
# Patch name -> "applied" | "source" | "off" | "waiting" | "refused: ...".
_state: dict[str, str] = {p.name: "waiting" for p in PATCHES}


def state() -> dict[str, str]:
    """What became of each patch in this process (for ``doctor`` and tests)."""
    return dict(_state)


def installed_version(package: str) -> str | None:
    """Version of the installed distribution ``package``, or None."""
    from importlib import metadata  # slow to import; only needed once a patched module is there

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_version(package: str) -> None:
    """Raises UnsupportedVersionError unless ``package`` is absent or in the supported range."""
    version = installed_version(package)
    if version is not None and not in_range(version, *_RANGES[package]):
        raise UnsupportedVersionError(package, version, range_text(*_RANGES[package]))


class _WhereNobodyListens(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as the program has set up no logging of its own: without a handler
    Python drops everything below a warning, and with it the line that each sync leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def activate() -> None:
    """Registers the hooks of all enabled patches, once per process.

    Also SGLang's plugin entry point (group ``sglang.srt.plugins``).

    Raises:
        SettingError: an environment variable of this package does not parse.
        UnsupportedVersionError, PatchMismatchError: a module that is imported already cannot be
            patched; where it is imported later, its import raises instead.
    """
    global _activated
    if getattr(_inside, "hook", False):
        return  # a patch being applied imports this package; whoever applies it reports errors
    with _lock:
        if _activated:
            return
        settings = settings_module.load()
        _activated = True
    for name in ("sglang_rdt", "megatron_rdt"):
        own = logging.getLogger(name)
        own.setLevel(settings.log_level.upper())
        if not any(isinstance(h, _WhereNobodyListens) for h in own.handlers):
            own.addHandler(_WhereNobodyListens())
    errors: list[RdtError] = []
    for patch in PATCHES:
        if not settings.enabled or not settings.monkeypatch or not getattr(settings, patch.toggle):
            _state[patch.name] = "off"
            continue
        try:
            wrapt.register_post_import_hook(_hook(patch), patch.module)
        except RdtError as error:
            errors.append(error)
    if errors:
        _activated = False  # so that importing this package again says it again
        raise errors[0]


def _hook(patch: Patch) -> Callable[[ModuleType], None]:
    def hook(module: ModuleType) -> None:
        _inside.hook = True
        try:
            _apply(patch, module)
        except RdtError as error:
            _state[patch.name] = f"refused: {error}"
            if patch.on_refusal == "log":
                logger.error("%s", error)
                return
            if getattr(module.__spec__, "_initializing", False):
                # wrapt forgets a hook once it has called it: the next attempt to import the
                # module must be refused again, not succeed unpatched.
                sys.modules.pop(patch.module, None)
                wrapt.register_post_import_hook(hook, patch.module)
            raise
        finally:
            _inside.hook = False

    return hook


def _apply(patch: Patch, module: ModuleType) -> None:
    if _state[patch.name] == "applied":
        return
    import inspect

    if getattr(module, patch.marker, False):
        _state[patch.name] = "source"
        return
    check_version(patch.package)
    source = inspect.getsource(module)
    if f"\n{patch.marker} = True\n" in source:
        # The first hook of the module imports this package; the second comes further down.
        _state[patch.name] = "source"
        return
    mismatch = patch.mismatch(source)
    if mismatch is not None:
        toggle = next(
            f.metadata["env"]
            for f in settings_module.Settings.__dataclass_fields__.values()
            if f.name == patch.toggle
        )
        raise PatchMismatchError(patch.name, *mismatch, toggle)
    patch.apply(module)
    _state[patch.name] = "applied"
    logger.debug("patch %s applied to %s", patch.name, patch.module)
