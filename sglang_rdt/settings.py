"""Every environment toggle, typed, in one place.

Plain dataclasses rather than pydantic: this module is imported by every process that imports
the package, SGLang and Megatron or not, and must cost next to nothing.

``sglang-rdt settings`` prints the table; ``docs/settings.md`` is generated from it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_rdt.brief import cut
from sglang_rdt.errors import SettingError

VerifyMode = Literal["off", "checksum", "equal"]
PauseMode = Literal["retract", "in_place"]
FailurePolicy = Literal["raise", "log"]
TransferMode = Literal["auto", "direct", "bucketed"]
Runner = Literal["target", "draft", "both"]

# One call of a direct sync is four phases, each with a deadline of its own, and some grace.
WAITS_PHASES = 5
# Smaller ones only make calls.
MIN_BUCKET_BYTES = 1 << 16

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_SIZE = re.compile(r"(\d+)\s*([kmg]i?b?|b)?", re.IGNORECASE)
_UNIT = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bool(text: str) -> bool:
    """``1/true/yes/on`` or ``0/false/no/off``, in any case."""
    low = text.strip().lower()
    if low in _TRUE:
        return True
    if low in _FALSE:
        return False
    raise ValueError("expected one of 1/0, true/false, yes/no, on/off")


def parse_bytes(text: str) -> int:
    """A positive byte count: ``268435456``, ``256M``, ``256MiB``, ``1g`` (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if not match or len(match[1]) > 18 or int(match[1]) == 0:
        raise ValueError("expected a positive size such as 268435456, 256MiB or 1G")
    return int(match[1]) * _UNIT[(match[2] or "b")[0].lower()]


def parse_seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError("expected a positive number of seconds")
    return value


def parse_count(text: str) -> int:
    """An integer, 0 or more."""
    value = int(text)
    if value < 0:
        raise ValueError("expected an integer, 0 or more")
    return value


def parse_every(text: str) -> int:
    """``first`` (0), ``every`` (1) or a positive integer."""
    named = {"first": 0, "every": 1}.get(text.strip().lower())
    if named is not None:
        return named
    value = int(text)
    if value < 1:
        raise ValueError("expected first, every, or a positive integer")
    return value


def parse_choice(*choices: str) -> Callable[[str], str]:
    """A parser that accepts exactly ``choices``, in any case."""

    def parse(text: str) -> str:
        low = text.strip().lower()
        if low not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return low

    return parse


def parse_patterns(text: str) -> tuple[str, ...]:
    """Patterns, separated by commas or blanks; empty means none."""
    return tuple(re.split(r"[,\s]+", text.strip(", \t\n"))) if text.strip(", \t\n") else ()


def parse_optional_text(text: str) -> str | None:
    """Any text; empty means unset."""
    return text.strip() or None


def _setting(env: str, default: Any, parse: Callable[[str], Any], doc: str) -> Any:
    return field(default=default, metadata={"env": env, "parse": parse, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. :func:`load` reads it; tests build it directly."""

    enabled: bool = _setting(
        "SGLANG_RDT",
        True,
        parse_bool,
        "The whole package on or off; off also silences the patch set.",
    )
    monkeypatch: bool = _setting(
        "SGLANG_RDT_MONKEYPATCH",
        True,
        parse_bool,
        "Patch SGLang and Megatron-core at import. Turn off where the patch set is applied to the sources.",
    )
    patch_scheduler_actor: bool = _setting(
        "SGLANG_RDT_PATCH_SCHEDULER_ACTOR",
        True,
        parse_bool,
        "Patch `scheduler_actor`: named SchedulerActors that can pull weights.",
    )
    patch_event_loop: bool = _setting(
        "SGLANG_RDT_PATCH_EVENT_LOOP",
        True,
        parse_bool,
        "Patch `event_loop`: run weight-sync calls on the scheduler's event-loop thread.",
    )
    patch_weight_version: bool = _setting(
        "SGLANG_RDT_PATCH_WEIGHT_VERSION",
        True,
        parse_bool,
        "Patch `weight_version`: the tokenizer manager follows the version that the schedulers set.",
    )
    patch_dp_controller: bool = _setting(
        "SGLANG_RDT_PATCH_DP_CONTROLLER",
        True,
        parse_bool,
        "Patch `dp_controller`: RayEngine starts with `dp_size` above 1 (SGLang 0.5.20 to 0.5.23 fail).",
    )
    patch_placement: bool = _setting(
        "SGLANG_RDT_PATCH_PLACEMENT",
        True,
        parse_bool,
        "Patch `placement`: engines reuse reserved bundles, other nodes start nothing, "
        "engine info, and a shutdown that ends only what the engine started.",
    )
    patch_quantised_weights: bool = _setting(
        "SGLANG_RDT_PATCH_QUANTISED_WEIGHTS",
        True,
        parse_bool,
        'Patch `quantised_weights`: weights that SGLang quantises after loading (`quantization="fp8"`) '
        "can be synced.",
    )
    patch_optimizer_step: bool = _setting(
        "MEGATRON_RDT_PATCH_OPTIMIZER_STEP",
        True,
        parse_bool,
        "Patch `optimizer_step`: export hook after a successful Megatron optimizer step.",
    )
    namespace: str | None = _setting(
        "SGLANG_RDT_NAMESPACE",
        None,
        parse_optional_text,
        "Ray namespace of the scheduler actors, and where engines are looked up; "
        "unset: the namespace of the Ray job.",
    )
    placement_group: str | None = _setting(
        "SGLANG_RDT_PLACEMENT_GROUP",
        None,
        parse_optional_text,
        "Placement group for engines that are not given one, by id (hex) or name, of any job; its "
        "bundles have one GPU each, and `SGLANG_RAY_BUNDLE_INDICES` may say which, in rank order.",
    )
    engine_info: bool = _setting(
        "SGLANG_RDT_ENGINE_INFO",
        False,
        parse_bool,
        "Engines serve each rank's parallel configuration over HTTP at SGLang's "
        "`engine_info_bootstrap_port`, without seeding weights.",
    )
    ray_address: str = _setting(
        "SGLANG_RDT_RAY_ADDRESS",
        "auto",
        str,
        "Ray cluster that trainer processes join when they are not Ray workers already.",
    )
    mode: TransferMode = _setting(
        "SGLANG_RDT_MODE",
        "auto",
        parse_choice("auto", "direct", "bucketed"),
        "How weights move: `direct` reads them out of live trainer memory, `bucketed` gathers, "
        "converts and stages them; `auto` is direct where the source of HF tensors can say where "
        "they lie.",
    )
    bucket_bytes: int = _setting(
        "SGLANG_RDT_BUCKET_BYTES",
        512 << 20,
        parse_bytes,
        "Staging memory at a time: per engine rank served on a trainer rank (bucketed mode, and "
        "strided slices of direct mode), and on an engine rank (strided slices of direct mode).",
    )
    include: tuple[str, ...] = _setting(
        "SGLANG_RDT_INCLUDE",
        (),
        parse_patterns,
        "Patterns of HF names (`*`, `?`, `[...]`; comma-separated): only tensors that match one are "
        "synced, the rest of the engine's weights stays as it is; unset: all.",
    )
    exclude: tuple[str, ...] = _setting(
        "SGLANG_RDT_EXCLUDE",
        (),
        parse_patterns,
        "Patterns of HF names: tensors that match one are not synced.",
    )
    keep: tuple[str, ...] = _setting(
        "SGLANG_RDT_KEEP",
        (),
        parse_patterns,
        "Patterns of names of the engine's own parameters: those are kept as they are, and the "
        "trainer must have no tensor for them (a vision tower beside a language model).",
    )
    runner: Runner = _setting(
        "SGLANG_RDT_RUNNER",
        "target",
        parse_choice("target", "draft", "both"),
        "Which model of an engine with speculative decoding is synced; with `target`, what the draft "
        "does not share with it stays as it is.",
    )
    link_costs: str | None = _setting(
        "SGLANG_RDT_LINK_COSTS",
        None,
        parse_optional_text,
        "JSON file of `sglang-rdt bench --calibrate`: what links and copies cost here, which decides "
        "what direct mode stages; unset: the costs of two H200 over NVLink.",
    )
    plan_report: str | None = _setting(
        "SGLANG_RDT_PLAN_REPORT",
        None,
        parse_optional_text,
        "JSON file that trainer rank 0 writes at each connect: which parameter goes which way, and "
        "how many bytes; `sglang-rdt plan --report` shows it.",
    )
    nixl_threads: int = _setting(
        "SGLANG_RDT_NIXL_THREADS",
        4,
        parse_count,
        "Threads that post NIXL transfers on a process with a GPU (0: the calling thread alone).",
    )
    verify: VerifyMode = _setting(
        "SGLANG_RDT_VERIFY",
        "checksum",
        parse_choice("off", "checksum", "equal"),
        "What is compared after a sync: nothing, an additive 64-bit checksum per parameter, or every "
        "byte. For `equal`, engines first overwrite with a pattern what is to be written.",
    )
    verify_every: int = _setting(
        "SGLANG_RDT_VERIFY_EVERY",
        1,
        parse_every,
        "After which syncs: `1` every one, `N` the first after each connect and every N-th, `first` "
        "only the first.",
    )
    takeover: bool = _setting(
        "SGLANG_RDT_TAKEOVER",
        False,
        parse_bool,
        "Connect to engines although another trainer, which still runs, is connected to them; that "
        "one is refused from then on.",
    )
    engine_failures: FailurePolicy = _setting(
        "SGLANG_RDT_ENGINE_FAILURES",
        "raise",
        parse_choice("raise", "log"),
        "What a sync does that reached some engines and not others: `raise` SyncError, or `log` it "
        "and let training go on. Without any engine it raises.",
    )
    pause_mode: PauseMode = _setting(
        "SGLANG_RDT_PAUSE_MODE",
        "retract",
        parse_choice("retract", "in_place"),
        "What happens to running requests: `retract` recomputes them on the new weights, "
        "`in_place` keeps their old KV cache (needs SGLANG_RDT_FLUSH=0 while requests run).",
    )
    flush: bool = _setting(
        "SGLANG_RDT_FLUSH", True, parse_bool, "Flush the engine's KV cache before new weights land."
    )
    allow_cast: bool = _setting(
        "SGLANG_RDT_ALLOW_CAST",
        False,
        parse_bool,
        "Allow lossy dtype conversions (trainer fp32 to engine bf16); each is named in the log.",
    )
    allow_padding: bool = _setting(
        "SGLANG_RDT_ALLOW_PADDING",
        False,
        parse_bool,
        "Allow engine loaders to fill up HF tensors that are smaller than their parameter (SGLang "
        "does so on a CPU for odd widths); padded vocabularies are always fine.",
    )
    connect_timeout_s: float = _setting(
        "SGLANG_RDT_CONNECT_TIMEOUT_S",
        120.0,
        parse_seconds,
        "Deadline for finding and describing engines, recording loaders and registering memory.",
    )
    phase_timeout_s: float = _setting(
        "SGLANG_RDT_PHASE_TIMEOUT_S",
        120.0,
        parse_seconds,
        "Deadline for each phase of a sync on each engine (pause, one pull, finalise, ...).",
    )
    stall_timeout_s: float = _setting(
        "SGLANG_RDT_STALL_TIMEOUT_S",
        600.0,
        parse_seconds,
        "An engine that hears nothing for this long in the middle of a sync gives the sync up.",
    )
    export_every: int = _setting(
        "MEGATRON_RDT_EXPORT_EVERY",
        1,
        parse_count,
        "Sync after every N-th successful optimizer step; 0: only when the program asks.",
    )
    overlap: bool = _setting(
        "MEGATRON_RDT_OVERLAP",
        False,
        parse_bool,
        "The sync after a step goes on under the next forward and backward pass; the next step "
        "waits for it. Direct mode only: a bucketed sync uses Megatron's process groups.",
    )
    hf_config: str | None = _setting(
        "MEGATRON_RDT_HF_CONFIG",
        None,
        parse_optional_text,
        "Folder or file of the Hugging Face config.json that names the exported tensors, where the "
        "program does not pass one. If set, the step hook connects by itself.",
    )
    log_level: str = _setting(
        "SGLANG_RDT_LOG_LEVEL",
        "info",
        parse_choice("debug", "info", "warning", "error"),
        "Level of the loggers `sglang_rdt` and `megatron_rdt`.",
    )

    def replace(self, **changes: Any) -> Settings:
        """A copy with ``changes``."""
        return dataclasses.replace(self, **changes)

    def env(self) -> dict[str, str]:
        """The environment variables that reproduce these settings in another process."""
        out = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            text = str(int(value)) if isinstance(value, bool) else text
            out[f.metadata["env"]] = (
                "first" if f.metadata["parse"] is parse_every and not value else text
            )
        return out


# Read by sglang_rdt.cpu, before any of this package's settings exist; listed for the table.
CPU_STANDINS = (
    "SGLANG_RDT_CPU_STANDINS",
    "1",
    "CPU environments only: 0 leaves out the stand-ins for missing GPU kernels.",
)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``environ`` (default ``os.environ``).

    Raises:
        SettingError: a value that does not parse, or a variable with one of this package's
            prefixes that does not exist (a typo must not switch anything off silently).
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    known = {CPU_STANDINS[0], "SGLANG_RDT_TEST_CACHE"}
    for f in dataclasses.fields(Settings):
        name = f.metadata["env"]
        known.add(name)
        text = environ.get(name)
        if text is None:
            continue
        try:
            values[f.name] = f.metadata["parse"](text)
        except ValueError as error:
            raise SettingError(name, cut(text, 200), cut(str(error), 400)) from None
    for name in environ:
        if name.startswith(("SGLANG_RDT_", "MEGATRON_RDT_")) and name not in known:
            # Without its value: it is not ours, and may be a secret.
            raise SettingError(name, "...", "no such setting; see `sglang-rdt settings`")
    settings = Settings(**values)
    if settings.bucket_bytes < MIN_BUCKET_BYTES:
        raise SettingError(
            "SGLANG_RDT_BUCKET_BYTES", str(settings.bucket_bytes), f"at least {MIN_BUCKET_BYTES}"
        )
    if settings.stall_timeout_s < WAITS_PHASES * settings.phase_timeout_s:
        raise SettingError(
            "SGLANG_RDT_STALL_TIMEOUT_S",
            f"{settings.stall_timeout_s:g}",
            f"an engine would give up while its trainer still waits for others, up to {WAITS_PHASES} "
            f"phases of {settings.phase_timeout_s:g} s (SGLANG_RDT_PHASE_TIMEOUT_S)",
        )
    return settings


def table() -> list[tuple[str, str, str]]:
    """Rows ``(environment variable, default, meaning)`` in a fixed order."""
    rows = []
    for f in dataclasses.fields(Settings):
        default = f.default
        shown = (
            ""
            if default in (None, ())
            else str(int(default) if isinstance(default, bool) else default)
        )
        rows.append((f.metadata["env"], shown, f.metadata["doc"]))
    rows.append(CPU_STANDINS)
    return rows
