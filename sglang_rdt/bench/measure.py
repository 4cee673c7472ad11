"""Measuring one path: warm-up, syncs, medians, memory, and whether every byte arrived."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_rdt.bench import engine_side, memory
from sglang_rdt.bench.options import BenchError
from sglang_rdt.bench.paths.base import BenchPath, Context, Timing

if TYPE_CHECKING:
    from sglang_rdt.bench.trainer import BenchRank

# Syncs per bucket size where the best one is looked for, and before them.
_TRIALS, _TRIAL_WARMUP = 3, 2
_EMPTY_CALLS = 100

Log = Callable[[str], None]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, rounded to microseconds where they are milliseconds."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Between the two nearest values, in proportion."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """``total_ms`` and ``phases_ms`` (medians; a phase that a sync did not have counts as 0)."""
    totals = [t.seconds * 1e3 for t in timings]
    names: dict[str, None] = {}
    for timing in timings:
        names.update(dict.fromkeys(timing.phases))
    return {
        "total_ms": {**spread(totals), "p90": round(percentile(totals, 90), 3)},
        "phases_ms": {
            n: round(statistics.median(t.phases.get(n, 0.0) for t in timings) * 1e3, 3)
            for n in names
        },
        "samples_ms": [
            {
                "total": round(t.seconds * 1e3, 2),
                **{n: round(v * 1e3, 2) for n, v in t.phases.items()},
            }
            for t in timings
        ],
    }


def gbps(nbytes: int, milliseconds: float) -> float:
    """Bytes in milliseconds as GB/s (10^9)."""
    return round(nbytes / milliseconds / 1e6, 3) if milliseconds else 0.0


class Keys:
    """A new key for every sync, so that no old byte can pass for a new one."""

    def __init__(self) -> None:
        self._next: Iterator[int] = itertools.count(1)
        self.current = 0

    def change(self, context: Context) -> int:
        """New values in every trainer parameter."""
        self.current = next(self._next)
        context.trainers.all("change", self.current)
        return self.current


class Measurement:
    """Measures paths, one after the other, with the same processes.

    Args:
        log: takes a line of progress.
    """

    def __init__(self, context: Context, log: Log) -> None:
        self._context, self._log = context, log
        self._keys = Keys()
        self._control: bool | None = None

    def run(self, path: BenchPath) -> dict[str, Any]:
        """Everything about ``path``, as the results have it.

        Raises:
            BenchError, RdtError, Ray's errors: it failed; the path is stopped.
        """
        context = self._context
        sizes = path.sizes(context)
        trials: dict[str, Any] = {}
        size: int | None = None
        if len(sizes) > 1:
            for each in sizes:
                trials[str(each)] = self._trial(path, each)
            good = {s: t["total_ms"]["median"] for s, t in trials.items() if "total_ms" in t}
            if not good:
                raise BenchError(f"no bucket size worked: {trials}")
            size = int(min(good, key=lambda s: good[s]))
        elif sizes:
            size = sizes[0]
        return self._measure(path, size, trials)

    def _trial(self, path: BenchPath, size: int) -> dict[str, Any]:
        try:
            with _stopped(path, self._context):
                path.start(self._context, size)
                self._syncs(path, _TRIAL_WARMUP, "trial-warm")
                found = summary(self._syncs(path, _TRIALS, "trial"))
        except Exception as error:
            self._log(f"{path.name}: buckets of {size >> 20} MiB failed: {one_line(error)}")
            return {"failed": one_line(error)}
        self._log(
            f"{path.name}: buckets of {size / (1 << 20):g} MiB: "
            f"{found['total_ms']['median']:.1f} ms, median of {_TRIALS}"
        )
        return found

    def _measure(self, path: BenchPath, size: int | None, trials: dict[str, Any]) -> dict[str, Any]:
        context, options = self._context, self._context.options
        count = options.disk_syncs if path.name == "sglang_disk" else options.syncs
        before_path = self._marks()
        with _stopped(path, context):
            notes = path.start(context, size)
            first = self._syncs(path, 1, "first")[0]
            warm = min(options.warmup, max(count // 3, 1))
            self._syncs(path, warm, "warmup")
            before_syncs = self._marks()
            counts = [self._counts()]
            timings = self._syncs(path, count, "sync")
            tops = self._peaks()
            counts.append(self._counts())
            staging = path.staging_bytes(context), self._engine_staging()
            compared, wrong = self._compare(path)
        if not path.writes_engines:
            wrong = [] if getattr(path, "equal", False) else ["the copy differs"]
        found = summary(timings)
        result: dict[str, Any] = {
            **found,
            "extra_bytes": {
                side: max(
                    (
                        memory.extra(a, b, top, staging[i], options.device)
                        for a, b, top in zip(before_path[i], before_syncs[i], tops[i], strict=True)
                    ),
                    default=0,
                )
                for i, side in enumerate(("trainer", "engine"))
            },
            "equal": not wrong,
            # Of what the engines hold, on every path, whatever it sends for that.
            "gbps": gbps(context.nbytes, found["total_ms"]["median"]),
            "bytes_sent": timings[0].nbytes,
            "syncs": len(timings),
            "warmup": warm + 1,
            "first_ms": round(first.seconds * 1e3, 3),
            "staging_bytes": {"trainer": staging[0], "engine": staging[1]},
            "parameters_compared": compared,
            # Before and after the measured syncs, on the rank with most: what grows, leaks.
            "registrations": _sides(counts, 0),
            "resident_bytes": _sides(counts, 1),
            "about": path.about,
            **{k: round(v, 3) if isinstance(v, float) else v for k, v in notes.items()},
        }
        if options.device == "cuda":
            # With what NCCL, NIXL and the allocator hold besides tensors.
            result["extra_device_bytes"] = {
                side: max(
                    (t.device - a.device for a, t in zip(before_path[i], tops[i], strict=True)),
                    default=0,
                )
                for i, side in enumerate(("trainer", "engine"))
            }
        more = [t.notes["returned_ms"] for t in timings if "returned_ms" in t.notes]
        if more:
            result["returned_ms"] = spread(more)
        if wrong:
            result["differences"] = wrong[:20]
        if size is not None:
            result["bucket_bytes"] = size
        if trials:
            result["by_bucket_bytes"] = trials
        self._log(
            f"{path.name}: {found['total_ms']['median']:.1f} ms "
            f"({found['total_ms']['min']:.1f} to {found['total_ms']['max']:.1f}), "
            f"{result['gbps']:.1f} GB/s, {'equal' if result['equal'] else 'NOT EQUAL'}"
        )
        for line in wrong[:5]:
            self._log(f"  {line}")
        return result

    def _syncs(self, path: BenchPath, count: int, label: str) -> list[Timing]:
        timings = []
        for i in range(count):
            if path.writes_engines:
                self._keys.change(self._context)
            # The GPU is at work for some 20 ms after a pull of this size (UCX's own streams), and
            # a sync never follows another that soon.
            time.sleep(self._context.options.gap_s)
            timing = path.sync(self._context, f"{path.name}-{label}-{self._keys.current}-{i}")
            timings.append(timing)
        return timings

    def _compare(self, path: BenchPath) -> tuple[int, list[str]]:
        """All engines, byte for byte; the first time also that the comparison can fail."""
        if not path.writes_engines:
            return 0, []
        context, options = self._context, self._context.options
        compared, wrong = 0, []
        for served in context.engines:
            count, lines = engine_side.compare(
                served.engine, options.model.model, self._keys.current, options.timeout_s
            )
            compared += count
            wrong += [f"{served.address} {line}" for line in lines]
            if self._control is None and not lines:
                _, lines = engine_side.compare(
                    served.engine, options.model.model, self._keys.current - 1, options.timeout_s
                )
                self._control = len(lines) == count
                if not self._control:
                    raise BenchError(
                        f"the comparison is no good: {len(lines)} of {count} parameters differ "
                        "from the values before the last sync, and all of them should"
                    )
        return compared, wrong

    def _marks(self) -> tuple[list[memory.Mark], list[memory.Mark]]:
        return self._everywhere(_mark_trainer, engine_side.mark)

    def _peaks(self) -> tuple[list[memory.Mark], list[memory.Mark]]:
        return self._everywhere(_peak_trainer, engine_side.peak)

    def _counts(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return self._everywhere(engine_side.counts, engine_side.counts)

    def _everywhere(self, on_trainer: Any, on_engine: Any) -> tuple[list[Any], list[Any]]:
        timeout = self._context.options.timeout_s
        engines = [
            found
            for served in self._context.engines
            for found in engine_side.on_ranks(
                served.engine, on_engine, timeout_s=timeout, phase="memory"
            )
        ]
        return self._context.trainers.call(on_trainer), engines

    def _engine_staging(self) -> int:
        timeout = self._context.options.timeout_s
        return max(
            n
            for served in self._context.engines
            for n in engine_side.staging_bytes(served.engine, timeout)
        )


@contextlib.contextmanager
def _stopped(path: BenchPath, context: Context) -> Iterator[None]:
    """Stops ``path`` at the end; what went wrong inside is not hidden by what goes wrong then."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            path.stop(context)
        raise
    path.stop(context)


def _sides(counts: Sequence[Any], which: int) -> dict[str, list[int]]:
    return {
        side: [max(count[which] for count in moment[i]) for moment in counts]
        for i, side in enumerate(("trainer", "engine"))
    }


def empty_call_ms(rank: BenchRank, actor: Any) -> float:
    """Median of a Ray call that does nothing, from a trainer rank to an engine rank and back."""
    import ray

    milliseconds = []
    for _ in range(_EMPTY_CALLS):
        started = time.perf_counter()
        ray.get(actor.__ray_ready__.remote(), timeout=rank.args.timeout_s)
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return statistics.median(milliseconds)


def _mark_trainer(rank: BenchRank) -> memory.Mark:
    return memory.mark(rank.device)


def _peak_trainer(rank: BenchRank) -> memory.Mark:
    return memory.peak(rank.device)


def one_line(error: BaseException) -> str:
    """What went wrong, without a traceback."""
    from sglang_rdt.coordinator import calls

    return calls.short(error).strip().replace("\n", " ")[:500]
