"""Requests on an engine while its weights change, and who may have said what.

Weights cycle through a few known sets, and a version's name tells its set. So every token of every
reply can be compared with what transformers says for the version that the token is labelled with.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout
from sglang_rdt.demo.workers import ServedEngine, Trainers
from sglang_rdt.settings import Settings
from tests.e2e.conftest import EngineKey, EnginePool, TrainerPool

# float32: greedy tokens are those of transformers, and a label can be judged by them.
KEY = EngineKey(TinyModel("dense"), 1, "float32")
SETS = 4
PROMPT_LENGTH = 5
# Two logits nearer than this, relative to the largest, may be added up either way.
TIE = 1e-4


def version_name(number: int) -> str:
    """The version of the ``number``-th sync, whose weights are set ``number % SETS``."""
    return f"v{number}"


def number_of(version: str) -> int:
    """Inverse of :func:`version_name`."""
    return int(version.removeprefix("v"))


# --- the trainer's side ---------------------------------------------------------------------------


def attached(
    engines: EnginePool, trainers: TrainerPool, settings: Settings
) -> tuple[ServedEngine, Trainers]:
    """The engine, and one trainer rank that can use each of the sets."""
    served = engines.get(KEY)
    group = trainers.get(KEY.model, Layout(), dtype=torch.float32)
    group.on_all(make_sets)
    group.attach(settings, on_step=False, engines=[served.address])
    return served, group


def make_sets(rank: Any) -> None:
    """Lets the rank keep all sets beside its live parameters."""
    trainer = rank.trainer
    rank.sets = []
    for seed in range(SETS):
        trainer._seed = 900 + seed
        trainer._load_initial_weights(trainer.model_chunks)
        rank.sets.append([p.detach().clone() for p in trainer.model_chunks[0].parameters()])


def use_set(rank: Any, number: int) -> None:
    """Makes set ``number % SETS`` the live parameters, in place, as an optimizer step does."""
    live = rank.trainer.model_chunks[0].parameters()
    with torch.no_grad():
        for parameter, value in zip(live, rank.sets[number % SETS], strict=True):
            parameter.copy_(value)


def states_of(group: Trainers) -> list[dict[str, torch.Tensor]]:
    """HF tensors of every set."""
    states = []
    for number in range(SETS):
        group.on_all(use_set, number)
        states.append(group.weights())
    return states


@dataclass(frozen=True)
class Synced:
    """One sync, by the clock that all processes of a machine share."""

    number: int
    began: float
    returned: float
    seconds: float


def sync_number(rank: Any, number: int) -> Synced:
    """Brings the engine to version ``number``."""
    use_set(rank, number)
    began = time.monotonic()
    report = rank.sync.sync(version_name(number))
    return Synced(number, began, time.monotonic(), report.seconds)


def sync_numbers(rank: Any, first: int, last: int) -> list[Synced]:
    """One sync after another."""
    return [sync_number(rank, number) for number in range(first, last)]


# --- the engine's side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A finished request. ``spans``: ``(version, start, end)`` over its tokens."""

    prompt: tuple[int, ...]
    asked: int
    tokens: tuple[int, ...]
    label: str
    spans: tuple[tuple[str, int, int], ...]
    began: float
    ended: float
    retractions: int


@dataclass
class _Traffic:
    stop: threading.Event = field(default_factory=threading.Event)
    replies: list[Reply] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    sent: int = 0
    thread: threading.Thread | None = None


async def _ask(host: Any, prompt: Sequence[int], asked: int) -> Reply:
    began = time.monotonic()
    answer = await host.engine.async_generate(
        input_ids=list(prompt),
        sampling_params={"temperature": 0, "max_new_tokens": asked, "ignore_eos": True},
    )
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] != "length":
        raise RuntimeError(f"finished by {meta['finish_reason']}")
    return Reply(
        tuple(prompt),
        asked,
        tuple(answer["output_ids"]),
        meta["weight_version"],
        tuple((s["version"], s["start"], s["end"]) for s in meta["weight_versions"]),
        began,
        time.monotonic(),
        meta["num_retractions"],
    )


def start_traffic(
    host: Any, clients: Sequence[Sequence[tuple[Sequence[int], int]]], repeat: bool
) -> None:
    """Each client sends its ``(prompt, tokens)`` one after another; over and over if ``repeat``.

    On a thread that runs the engine's asyncio loop, so that the host itself can still be called.
    """
    traffic = host.traffic = _Traffic()

    async def client(jobs: Sequence[tuple[Sequence[int], int]]) -> None:
        while not traffic.stop.is_set():
            for prompt, asked in jobs:
                if traffic.stop.is_set():
                    break
                traffic.sent += 1
                try:
                    traffic.replies.append(await _ask(host, prompt, asked))
                except Exception as error:
                    traffic.errors.append(f"{type(error).__name__}: {error}")
            if not repeat:
                break

    async def everyone() -> None:
        await asyncio.gather(*(client(jobs) for jobs in clients))

    def run() -> None:
        asyncio.set_event_loop(host.engine.loop)
        host.engine.loop.run_until_complete(everyone())

    traffic.thread = threading.Thread(target=run, daemon=True)
    traffic.thread.start()


def finish_traffic(host: Any, stop: bool, timeout_s: float = 60.0) -> tuple[list[Reply], list[str]]:
    """Waits for what was sent (``stop``: and sends no more): replies and errors.

    Raises:
        TimeoutError: requests are lost.
    """
    traffic = host.traffic
    if stop:
        traffic.stop.set()
    traffic.thread.join(timeout_s)
    if traffic.thread.is_alive():
        missing = traffic.sent - len(traffic.replies) - len(traffic.errors)
        raise TimeoutError(f"{missing} of {traffic.sent} requests had no reply in {timeout_s} s")
    assert traffic.sent == len(traffic.replies) + len(traffic.errors)
    return traffic.replies, traffic.errors


def calm_down(host: Any) -> None:
    """Ends what a test that failed may have left: requests, and a pause."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    traffic, manager = getattr(host, "traffic", None), host.engine.tokenizer_manager
    if traffic is None:
        return
    traffic.stop.set()
    if manager.is_pause and traffic.thread.is_alive():
        action = manager.continue_generation(ContinueGenerationReqInput())
        asyncio.run_coroutine_threadsafe(action, host.engine.loop).result(30)
    traffic.thread.join(30)


def on_host(served: ServedEngine, run: Callable[..., Any], *args: Any) -> Any:
    """``run(host, *args)`` in the process of the RayEngine."""
    import ray

    return ray.get(served.host.call.remote(run, *args), timeout=120)


def on_engine(served: ServedEngine, run: Callable[..., Any], *args: Any) -> Any:
    """``run(actor, *args)`` in the engine's only scheduler actor, on one of Ray's threads."""
    import ray

    return ray.get(served.engine.actors[0].__ray_call__.remote(run, *args), timeout=120)


# --- what there is in a process -------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a process holds that could pile up."""

    rss: int
    threads: int
    refs: int
    registrations: int


def footprint(_: Any) -> Footprint:
    """Of the process that runs this."""
    import psutil
    from ray._private.worker import global_worker

    from sglang_rdt.transport import nixl

    gc.collect()
    process = psutil.Process()
    return Footprint(
        rss=process.memory_info().rss,
        threads=process.num_threads(),
        refs=len(global_worker.core_worker.get_all_reference_counts()),
        registrations=nixl.registrations(),
    )


def living_actors() -> int:
    """Actors in the cluster, named or not."""
    from ray._private import state

    return len(state.actors(actor_state_name="ALIVE"))


# --- the judge ------------------------------------------------------------------------------------


# What the engine still holds of a request's keys and values when it goes on after a sync: nothing
# (the cache was flushed), what its latest prefill left in the radix cache (retracted, not flushed),
# or everything (paused in place).
Kept = Literal["nothing", "prefilled", "all"]


class Judge:
    """What transformers would say, for every set of weights; each question is asked once.

    Args:
        states: HF tensors of each set.
    """

    def __init__(self, model: TinyModel, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._vocab = model.vocab
        self._models = [model.transformers_model(state) for state in states]
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}
        self.ties = 0

    def _logits(self, sets: tuple[int, ...], ids: tuple[int, ...]) -> torch.Tensor:
        """[length, vocab]: what follows each position, if ``sets[i]`` did the i-th one."""
        key = (sets, ids)
        if key not in self._known:
            from transformers import DynamicCache

            memory, parts, at = DynamicCache(), [], 0
            for one, run in itertools.groupby(sets):
                end = at + len(list(run))
                with torch.no_grad():
                    out = self._models[one](
                        torch.tensor([ids[at:end]]), past_key_values=memory, use_cache=True
                    )
                parts.append(out.logits[0])
                at = end
            self._known[key] = torch.cat(parts)
        return self._known[key]

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        """Prompts after which every set says something else, and no set hesitates. No two begin
        alike, so that none finds another's keys and values in the engine's cache."""
        found: list[tuple[int, ...]] = []
        generator = torch.Generator().manual_seed(7)
        beginnings = list(range(3, self._vocab))
        while len(found) < count:
            rest = torch.randint(3, self._vocab, (PROMPT_LENGTH - 1,), generator=generator)
            prompt = (beginnings[0], *rest.tolist())
            said = set()
            for number in range(SETS):
                logits = self._logits((number,) * PROMPT_LENGTH, prompt)[-1]
                first, second = logits.topk(2).values.tolist()
                if first - second > 100 * TIE * float(logits.abs().max()):
                    said.add(int(logits.argmax()))
            if len(said) == SETS:
                found.append(prompt)
                beginnings.pop(0)
        return found

    def objections(self, reply: Reply, kept: Kept = "nothing") -> list[str]:
        """Every token that the version on its label would not have said."""
        wrong = shape_objections(reply)
        if wrong:
            return wrong
        length = len(reply.prompt)
        memory: tuple[int, ...] = ()
        for version, start, end in reply.spans:
            own = number_of(version) % SETS
            ids = (reply.prompt + reply.tokens)[: length + end - 1]
            sets = memory + (own,) * (len(ids) - len(memory))
            logits = self._logits(sets, ids)
            for i in range(start, end):
                row, token = logits[length - 1 + i], reply.tokens[i]
                best = int(row.argmax())
                if token == best:
                    continue
                if float(row[best] - row[token]) <= TIE * float(row.abs().max()):
                    self.ties += 1
                    continue
                wrong.append(f"token {i} is {token}, {version} says {best}: {reply}")
            memory = {"nothing": (), "prefilled": sets[: length + start], "all": sets}[kept]
        return wrong


def shape_objections(reply: Reply) -> list[str]:
    """Whether all tokens are there, each with one label, and the last one's label on the reply."""
    if len(reply.tokens) != reply.asked:
        return [f"{len(reply.tokens)} tokens instead of {reply.asked}"]
    edges = [0, *(end for _, _, end in reply.spans)]
    starts = [start for _, start, _ in reply.spans]
    if edges[:-1] != starts or edges[-1] != reply.asked or edges != sorted(set(edges)):
        return [f"spans {reply.spans} do not cover {reply.asked} tokens"]
    if reply.label != reply.spans[-1][0]:
        return [f"label {reply.label}, but spans {reply.spans}"]
    return []


def staleness_objections(reply: Reply, syncs: Sequence[Synced]) -> list[str]:
    """Whether a version was served before its sync began, after the next one had returned, or
    without a sync that succeeded. Version 0 is from before ``syncs``."""
    by_number = {s.number: s for s in syncs}
    following = dict(zip([0, *by_number], syncs, strict=False))
    wrong = []
    numbers = [number_of(version) for version, _, _ in reply.spans]
    if numbers != sorted(numbers):
        wrong.append(f"versions go back: {reply.spans}")
    for number in numbers:
        own, after = by_number.get(number), following.get(number)
        if own is None and number:
            wrong.append(f"version {number}, which no sync brought")
        if own is not None and own.began > reply.ended:
            wrong.append(f"version {number} on a reply from before its sync")
        if after is not None and after.returned < reply.began:
            wrong.append(f"version {number} on a request from after the next sync")
    return wrong
