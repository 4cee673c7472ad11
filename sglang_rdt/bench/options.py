"""What a benchmark was asked to do: parsed, checked, and refused in one clear sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_rdt.bench.shapes import Shape, parse_model
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.errors import RdtError
from sglang_rdt.settings import MIN_BUCKET_BYTES, parse_bytes

PathName = Literal[
    "peer_copy", "direct", "direct_checksum", "bucketed", "sglang_distributed", "sglang_disk"
]
# In the order in which they run: the limit first, the slowest last.
PATHS: tuple[PathName, ...] = (
    "peer_copy",
    "direct",
    "direct_checksum",
    "bucketed",
    "sglang_distributed",
    "sglang_disk",
)


class BenchError(RdtError):
    """A benchmark that cannot be run as it was asked for, or a path of it that failed."""


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Args:
        device: "cpu" or "cuda".
        bucket_bytes: sizes to try for buckets; empty: a few that suit the device.
        trainer_gpus, engine_gpus: device ordinals; trainer ranks are dealt out to the former.
        ddp: lay parameters out in Megatron's contiguous buffers, as in training.
        train: instead of timing, train this many optimizer steps, each followed by a sync.
        gap_s: seconds between one sync and the next, as a training step leaves them.
        timeout_s: deadline of every single wait.
    """

    model: Shape
    trainer: Layout
    engine_tp: int
    engines: int
    paths: tuple[PathName, ...]
    device: Literal["cpu", "cuda"]
    syncs: int
    warmup: int
    disk_syncs: int
    bucket_bytes: tuple[int, ...]
    trainer_gpus: tuple[int, ...]
    engine_gpus: tuple[int, ...]
    verify: str
    ddp: bool
    train: int
    disk_dir: Path | None
    engine_args: Mapping[str, Any]
    gap_s: float
    timeout_s: float
    command: str = ""
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def gpu_of_rank(self) -> list[int]:
        """Device ordinal of each trainer rank."""
        return [self.trainer_gpus[r % len(self.trainer_gpus)] for r in range(self.trainer.world)]

    @property
    def shared_gpu(self) -> bool:
        """Whether two trainer ranks have one GPU; NCCL refuses that."""
        return self.device == "cuda" and len(set(self.gpu_of_rank)) < self.trainer.world


def make_options(
    *,
    model: str,
    trainer: str,
    engine: str,
    engines: int,
    paths: str,
    device: Literal["cpu", "cuda"],
    syncs: int,
    warmup: int,
    disk_syncs: int | None,
    bucket_bytes: str | None,
    trainer_gpus: str | None,
    engine_gpus: str | None,
    verify: str,
    ddp: bool,
    train: int,
    disk_dir: Path | None,
    engine_args: str | None,
    gap_ms: float,
    timeout_s: float,
    gpus: int,
    command: str = "",
) -> Options:
    """Options from the texts of a command line.

    Args:
        device: what to run on, decided already.
        gpus: how many GPUs this machine has.

    Raises:
        BenchError: naming the option and what it should look like.
    """
    layout = parse_layout(trainer)
    shape = _checked("--model", lambda: parse_model(model, vocab_multiple=layout.tp))
    tp = parse_counts("--engine", engine, ("tp",))["tp"]
    of_trainer, of_engines = _gpus(device, gpus, layout, tp, engines, trainer_gpus, engine_gpus)
    options = Options(
        model=shape,
        trainer=layout,
        engine_tp=tp,
        engines=engines,
        paths=parse_paths(paths),
        device=device,
        syncs=syncs,
        warmup=warmup,
        disk_syncs=syncs if disk_syncs is None else disk_syncs,
        bucket_bytes=parse_sizes(bucket_bytes),
        trainer_gpus=of_trainer,
        engine_gpus=of_engines,
        verify=_choice("--verify", verify, ("off", "checksum", "equal")),
        ddp=ddp,
        train=train,
        disk_dir=disk_dir,
        engine_args=_engine_args(engine_args),
        gap_s=gap_ms / 1e3,
        timeout_s=timeout_s,
        command=command,
    )
    _check(options)
    shown = {
        k: v for k, v in dataclasses.asdict(layout).items() if v is not None and (k, v) != ("cp", 1)
    }
    described: dict[str, Any] = {
        "trainer": ",".join(f"{k}={v}" for k, v in shown.items()),
        "engine": f"tp={tp}",
        "engines": engines,
    }
    if device == "cuda":
        described["trainer_gpus"] = list(of_trainer)
        described["engine_gpus"] = list(of_engines)
    return dataclasses.replace(options, layout=described)


def _check(options: Options) -> None:
    model = options.model.model
    for what, size in (
        ("--engine tp", options.engine_tp),
        ("--trainer tp", options.trainer.tp),
    ):
        if model.heads % size or (model.kv_heads % size and size % model.kv_heads):
            raise BenchError(
                f"{what}={size}: {options.model.name} has {model.heads} heads and "
                f"{model.kv_heads} key/value heads, which it does not divide"
            )
    if options.trainer.tp > model.kv_heads:
        raise BenchError(
            f"--trainer tp={options.trainer.tp}: more than {model.kv_heads} key/value heads"
        )
    if model.num_layers % options.trainer.pp:
        raise BenchError(
            f"--trainer pp={options.trainer.pp} does not divide {model.num_layers} layers"
        )
    if options.trainer.ep > 1 and not model.moe:
        raise BenchError(f"--trainer ep={options.trainer.ep}: {options.model.name} has no experts")
    if options.trainer.ep > 1 and model.experts % options.trainer.ep:
        raise BenchError(
            f"--trainer ep={options.trainer.ep} does not divide {model.experts} experts"
        )
    if options.train and options.shared_gpu:
        raise BenchError("--train needs a GPU for every trainer rank (NCCL)")


def parse_counts(option: str, text: str, names: Sequence[str]) -> dict[str, int]:
    """``tp=2,pp=1`` as a dictionary; names that are left out are 1.

    Raises:
        BenchError: an unknown name, or no positive number.
    """
    counts = dict.fromkeys(names, 1)
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, number = part.partition("=")
        if name.strip() not in names or not equals:
            raise BenchError(
                f"{option} {text!r}: expected {','.join(f'{n}=1' for n in names)}, not {part!r}"
            )
        if not number.strip().isdecimal() or int(number) < 1:
            raise BenchError(f"{option} {text!r}: {name.strip()} must be a number, 1 or more")
        counts[name.strip()] = int(number)
    return counts


def parse_layout(text: str) -> Layout:
    """``tp=2,pp=1,ep=1,etp=1,dp=1``: how the trainer is laid out.

    Raises:
        BenchError: it cannot be.
    """
    counts = parse_counts("--trainer", text, ("tp", "pp", "ep", "etp", "dp"))
    etp = counts.pop("etp") if "etp" in text else None
    counts.pop("etp", None)
    return _checked("--trainer", lambda: Layout(etp=etp, **counts))


def parse_paths(text: str) -> tuple[PathName, ...]:
    """``direct,bucketed``: which paths, in the order in which they run.

    Raises:
        BenchError: an unknown one, or none.
    """
    names = [p.strip() for p in text.split(",") if p.strip()]
    unknown = sorted(set(names) - set(PATHS))
    if unknown or not names:
        raise BenchError(
            f"--paths {text!r}: expected some of {', '.join(PATHS)}"
            + (f", not {', '.join(unknown)}" if unknown else "")
        )
    return tuple(p for p in PATHS if p in names)


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """``512MiB,2GiB``: bucket sizes in ascending order, each once.

    Raises:
        BenchError: not a size, or too small for a bucket.
    """
    sizes = set()
    for part in filter(None, (p.strip() for p in (text or "").split(","))):
        size = _checked("--bucket-bytes", lambda part=part: parse_bytes(part))  # type: ignore[misc]
        if size < MIN_BUCKET_BYTES:
            raise BenchError(f"--bucket-bytes {part}: at least {MIN_BUCKET_BYTES}")
        sizes.add(size)
    return tuple(sorted(sizes))


def default_bucket_sizes(nbytes: int, device: str, *, whole: bool) -> tuple[int, ...]:
    """Sizes worth trying for a model of ``nbytes``.

    Args:
        whole: also one bucket for everything, where that is less than 20 GiB.
    """
    mib = 1 << 20
    sizes = {512 * mib, 2048 * mib} if device == "cuda" else {64 * mib, 256 * mib}
    everything = max(_round_up(nbytes, mib), MIN_BUCKET_BYTES)
    if whole and everything <= 20 << 30:
        sizes.add(everything)
    elif not whole:
        sizes.add(max(sizes) * 2)
    # Larger than the model is the same as the model.
    return tuple(sorted({min(size, everything) for size in sizes}))


def parse_gpus(option: str, text: str, gpus: int) -> tuple[int, ...]:
    """``0,1``: device ordinals.

    Raises:
        BenchError: not numbers, twice the same, or more than there are.
    """
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts):
        raise BenchError(f"{option} {text!r}: expected GPU numbers such as 0,1")
    found = tuple(int(p) for p in parts)
    if len(set(found)) < len(found):
        raise BenchError(f"{option} {text!r}: names a GPU twice")
    if max(found) >= gpus:
        raise BenchError(f"{option} {text!r}: this machine has {gpus} GPU(s), numbered from 0")
    return found


def _gpus(
    device: str,
    gpus: int,
    layout: Layout,
    tp: int,
    engines: int,
    trainer_gpus: str | None,
    engine_gpus: str | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if device == "cpu":
        if trainer_gpus or engine_gpus:
            raise BenchError("--trainer-gpus and --engine-gpus are for --device cuda")
        return (), ()
    needed = tp * engines
    if engine_gpus:
        of_engines = parse_gpus("--engine-gpus", engine_gpus, gpus)
    elif trainer_gpus:
        taken = parse_gpus("--trainer-gpus", trainer_gpus, gpus)
        of_engines = tuple(g for g in range(gpus) if g not in taken)[:needed]
    else:
        of_engines = tuple(range(gpus))[-needed:]
    if len(of_engines) != needed:
        raise BenchError(
            f"{engines} engine(s) at tp={tp} need {needed} GPU(s), and there are "
            f"{len(of_engines)} for them; see --engine-gpus"
        )
    if trainer_gpus:
        of_trainer = parse_gpus("--trainer-gpus", trainer_gpus, gpus)
    else:
        of_trainer = tuple(g for g in range(gpus) if g not in of_engines)[: layout.world]
    if not of_trainer:
        raise BenchError("no GPU is left for the trainer; see --trainer-gpus and --engine-gpus")
    both = sorted(set(of_trainer) & set(of_engines))
    if both:
        raise BenchError(f"GPU {both[0]} is for the trainer and for an engine; they need their own")
    return of_trainer, of_engines


def _engine_args(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--engine-args: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BenchError('--engine-args: expected an object such as {"mem_fraction_static": 0.6}')
    return found


def _choice(option: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise BenchError(f"{option} {text!r}: expected one of {', '.join(choices)}")
    return text


def _checked(option: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise BenchError(f"{option}: {error}") from None


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
