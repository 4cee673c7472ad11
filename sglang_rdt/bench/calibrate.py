"""``bench --calibrate``: the planner's cost constants, measured on this machine.

Two processes and raw NIXL between them: what one large read takes, what many small ones take, what
a strided copy takes, and what a round takes in which one side packs and the other side reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from sglang_rdt.bench.options import BenchError

if TYPE_CHECKING:
    from sglang_rdt.plan.costs import LinkCosts

_MIB = 1 << 20
_REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """How much is moved.

    Args:
        link: bytes of the one large read.
        piece: bytes of each small one; they do not touch, so nothing merges them.
        pieces: how many of them, few and many.
        row: bytes of a row that is copied, out of rows of twice as many.
        rows: how many rows.
    """

    link: int
    piece: int
    pieces: tuple[int, int]
    row: int
    rows: int


_SIZES = {
    "cuda": Sizes(4096 * _MIB, 8192, (1024, 65536), 4096, 262144),
    "cpu": Sizes(512 * _MIB, 8192, (512, 16384), 4096, 32768),
}


def slope(few: tuple[int, float], many: tuple[int, float], piece: int, rate: float) -> float:
    """Seconds per descriptor, from two ``(descriptors, seconds)``, without the bytes' own time.

    Never 0: where descriptors cost less than can be seen, a nanosecond.
    """
    count = many[0] - few[0]
    return max((many[1] - few[1]) / count - piece / rate, 1e-9)


def calibrate(
    device: Literal["cpu", "cuda"], out: Path, timeout_s: float, console: Console
) -> None:
    """Measures, prints, and writes a file that the planner reads.

    Raises:
        BenchError: something did not finish in time.
    """
    costs = measure(device, timeout_s, lambda line: console.print(line, highlight=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    costs.save(out)
    console.print(str(out))


def measure(
    device: Literal["cpu", "cuda"], timeout_s: float, log: Callable[[str], None]
) -> LinkCosts:
    """The constants of this machine; between its first two GPUs, if it has them."""
    import logging
    import os

    import ray

    from sglang_rdt.bench.engines import ray_environment
    from sglang_rdt.bench.trainer import NOSET
    from sglang_rdt.plan.costs import LinkCosts

    os.environ.update(NOSET)
    ray_environment()
    sizes = _SIZES[device]
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        namespace="sglang-rdt-calibrate",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )

    def get(ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise BenchError(f"calibration did not go on within {timeout_s:g} s") from None

    try:
        kind = ray.remote(num_cpus=0, runtime_env={"env_vars": NOSET})
        source = kind(End).remote("source", device, 0, sizes)
        sink = kind(End).remote("sink", device, 1, sizes)
        get(sink.meet.remote(*get(source.card.remote())))
        link = get(sink.read_whole.remote())
        rate = sizes.link / link
        log(
            f"one descriptor, {sizes.link / 1e9:.2f} GB: {link * 1e3:.2f} ms, {rate / 1e9:.1f} GB/s"
        )
        few, many = ((n, get(sink.read_pieces.remote(n))) for n in sizes.pieces)
        each = slope(few, many, sizes.piece, rate)
        log(
            f"{few[0]} descriptors {few[1] * 1e3:.2f} ms, {many[0]} {many[1] * 1e3:.2f} ms: "
            f"{each * 1e6:.2f} us each"
        )
        copy = sizes.row * sizes.rows / get(source.strided_copy.remote())
        log(f"strided copy: {copy / 1e9:.1f} GB/s")
        rounds = get(sink.packed_rounds.remote(source, timeout_s))
        log(f"a packed round: {rounds * 1e3:.2f} ms")
    finally:
        ray.shutdown()
    return LinkCosts(
        link_bytes_per_s=rate, descriptor_s=each, copy_bytes_per_s=copy, round_s=rounds
    )


class End:
    """One end of the link, in a process of its own.

    Args:
        name: of its NIXL agent.
        gpu: device ordinal; one that does not exist is the last one.
    """

    def __init__(self, name: str, device: str, gpu: int, sizes: Sizes) -> None:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        from sglang_rdt import settings

        torch.set_num_threads(1)
        self._kind, self._sizes = device, sizes
        self._gpu = min(gpu, torch.cuda.device_count() - 1) if device == "cuda" else 0
        threads = 0
        if device == "cuda":
            torch.cuda.set_device(self._gpu)
            threads = settings.load().nixl_threads
        self._device = torch.device("cuda", self._gpu) if device == "cuda" else torch.device("cpu")
        spread = 2 * sizes.piece * max(sizes.pieces)
        count = max(sizes.link, spread, 2 * sizes.row * sizes.rows)
        self._memory = torch.zeros(count, dtype=torch.uint8, device=self._device)
        self._memory.fill_(gpu + 1)
        self._wait()
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=threads))
        base = self._memory.data_ptr()
        self._agent.register_memory([(base, count, self._gpu, "")], mem_type=device)
        self._remote: tuple[str, int, int] = ("", 0, 0)

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def card(self) -> tuple[bytes, str, int, int]:
        """What the other end needs to read from here."""
        return (
            self._agent.get_agent_metadata(),
            self._agent.name,
            self._memory.data_ptr(),
            self._gpu,
        )

    def meet(self, metadata: bytes, name: str, base: int, gpu: int) -> None:
        """Gets to know the end that is read from."""
        self._agent.add_remote_agent(metadata)
        self._remote = (name, base, gpu)

    def _prepared(self, offsets: Sequence[int], size: int) -> Any:
        import numpy as np

        name, base, gpu = self._remote
        mine = self._memory.data_ptr()
        local = np.array([(mine + o, size, self._gpu) for o in offsets], dtype=np.uint64)
        remote = np.array([(base + o, size, gpu) for o in offsets], dtype=np.uint64)
        descs = [self._agent.get_xfer_descs(d, mem_type=self._kind) for d in (local, remote)]
        return self._agent.initialize_xfer("READ", *descs, name, b"")

    def _read(self, handle: Any, deadline_s: float = 60.0) -> float:
        started = time.perf_counter()
        if self._agent.transfer(handle) == "ERR":
            raise BenchError("NIXL refused a read")
        while True:
            state = self._agent.check_xfer_state(handle)
            now = time.perf_counter()
            if state == "DONE":
                return now - started
            if state == "ERR" or now - started > deadline_s:
                raise BenchError(f"a NIXL read ended with {state} after {now - started:.1f} s")

    def _median(self, offsets: Sequence[int], size: int) -> float:
        handle = self._prepared(offsets, size)
        self._read(handle)  # the first one connects
        seconds = []
        for _ in range(_REPEATS):
            self._wait()
            time.sleep(0.03)  # what the one before left on the device's own streams
            seconds.append(self._read(handle))
        self._agent.release_xfer_handle(handle)
        return statistics.median(seconds)

    def read_whole(self) -> float:
        """Seconds of one large read; checked to have arrived."""
        self._memory.zero_()
        self._wait()
        seconds = self._median([0], self._sizes.link)
        if int(self._memory[: self._sizes.link].min()) != 1:
            raise BenchError("NIXL said DONE, and the bytes are not there")
        return seconds

    def read_pieces(self, count: int) -> float:
        """Seconds of ``count`` small reads that do not touch one another."""
        size = self._sizes.piece
        return self._median([2 * size * i for i in range(count)], size)

    def strided_copy(self) -> float:
        """Seconds to pack half of every row."""
        import torch

        rows, row = self._sizes.rows, self._sizes.row // 2  # elements of a weight in bfloat16
        source = self._memory[: 4 * row * rows].view(torch.bfloat16).view(rows, 2 * row)[:, :row]
        target = source.new_empty(rows, row)
        seconds = []
        for _ in range(_REPEATS + 1):
            self._wait()
            started = time.perf_counter()
            target.copy_(source)
            self._wait()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    def pack(self) -> None:
        """This end's half of a round: a small strided copy, finished when this returns."""
        row = self._sizes.row
        block = self._memory[: 32 * row].view(16, 2 * row)
        block[:, row:].copy_(block[:, :row])
        self._wait()

    def packed_rounds(self, source: Any, timeout_s: float) -> float:
        """Seconds of a round with next to no bytes: a call there, a read, a copy here."""
        import ray

        row = self._sizes.row
        handle = self._prepared([0], 16 * row)
        self._read(handle)
        seconds = []
        for _ in range(10 * _REPEATS):
            started = time.perf_counter()
            ray.get(source.pack.remote(), timeout=timeout_s)
            self._read(handle)
            self.pack()
            seconds.append(time.perf_counter() - started)
        self._agent.release_xfer_handle(handle)
        return statistics.median(seconds)
