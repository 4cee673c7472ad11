"""The scheduler's own pause, flush, weight-update session and version, across SGLang versions.

Everything here runs on the event-loop thread. Facts per version: SGLang 0.5.16 to 0.5.20 have no
weight-update session and a flush that refuses while requests wait; 0.5.19 brought per-token
version labels; 0.5.21 the session (``begin_weight_update`` ... ``end_weight_update``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_rdt.engine import caches, derived, pipeline, quantised, runners
from sglang_rdt.errors import EngineBusyError, EngineStateError

# On a batch in SGLang's queue whose result was taken out of turn.
_TAKEN = "_sglang_rdt_taken"


class SchedulerControl:
    """Drives one ``Scheduler`` (sglang.srt.managers.scheduler).

    Args:
        scheduler: the live scheduler of this process.
        who: this rank, for messages.
        label_replies: whether the tokenizer manager listens for versions (patch
            ``weight_version``); it dies of a message that it does not know.
    """

    def __init__(self, scheduler: Any, who: str, *, label_replies: bool) -> None:
        self.scheduler = scheduler
        self._who = who
        self._label_replies = label_replies
        self._version: str | None = None
        self._skips_taken = False

    @property
    def model(self) -> torch.nn.Module:
        """The served model of this rank."""
        return self.scheduler.tp_worker.model_runner.model

    def models(self, runner: str) -> Any:
        """What a sync of ``runner`` is about, see :func:`sglang_rdt.engine.runners.select`."""
        return runners.select(self.scheduler, runner, self._who)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters live."""
        return next(self.model.parameters()).device

    @property
    def has_session(self) -> bool:
        """SGLang >= 0.5.21."""
        return hasattr(self.scheduler.weight_updater, "begin_weight_update")

    @property
    def starts_empty(self) -> bool:
        """Whether the engine was started without weights, to be filled by a sync."""
        given = getattr(self.scheduler.server_args, "load_format", "")
        return str(getattr(given, "value", given)) == "dummy"

    @property
    def backs_weights_up(self) -> bool:
        """Whether weights whose memory was given back are what they were when it is resumed."""
        args = self.scheduler.server_args
        return bool(getattr(args, "enable_weights_cpu_backup", False))

    @property
    def paused(self) -> bool:
        """Whether generation is paused, by whomever."""
        return bool(self.scheduler._engine_paused)

    def vote(self, opinion: bool) -> bool:
        """True on every rank if all ranks say True: all that SGLang runs in step, so not the other
        replicas of plain data parallelism."""
        group = self._world.cpu_group if self.pipelined else self.scheduler.tp_cpu_group
        flag = torch.tensor([int(opinion)], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    @property
    def _world(self) -> Any:
        return self.scheduler.world_group

    @property
    def pipelined(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return int(self.scheduler.server_args.pp_size) > 1

    def refuse_unsupported_layout(self) -> None:
        """Raises EngineStateError for what has event loops that cannot be parked together, or
        weights that move without anybody's doing. Ranks of one engine answer alike."""
        args = self.scheduler.server_args
        why = None
        if self.pipelined and getattr(args, "disaggregation_mode", "null") not in (None, "null"):
            why = "pipeline parallelism in a prefill or decode server"
        elif getattr(args, "enable_dp_attention_local_control_broadcast", False):
            why = (
                "enable_dp_attention_local_control_broadcast, with which the ranks do not hear of a "
                "sync in the same turn"
            )
        elif getattr(args, "enable_eplb", False):
            why = "enable_eplb, which moves experts to other ranks while the engine runs"
        elif getattr(args, "elastic_ep_backend", None):
            why = "elastic_ep_backend, with which ranks come and go"
        if why is not None:
            raise EngineStateError(f"{self._who} cannot be synced: it runs {why}")

    def pause(self, mode: str) -> None:
        """Stops generation: ``retract`` or ``in_place``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if getattr(self.scheduler, "enable_continuous_input_polling", False):
            raise EngineStateError(
                f"{self._who}: a prefill server with continuous input polling cannot be synced: "
                "calls would run in the middle of a forward pass"
            )
        request = PauseGenerationReqInput(mode=mode)
        if not self.pipelined:
            self.scheduler.pause_generation(request)
            return
        late = pipeline.under_way(self.scheduler)
        if late:
            raise EngineStateError(f"{self._who}: {late} microbatches did not come to their end")
        if mode == "retract":
            pipeline.retract_all(self.scheduler, lambda: self.scheduler.pause_generation(request))
        else:
            self.scheduler.pause_generation(request)

    def resume(self) -> None:
        """Goes on generating; keeps the allocator's memory."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def flush(self) -> None:
        """Empties the KV cache, without emptying the allocator (that costs a second).

        Raises:
            EngineBusyError: requests hold cache; nothing was flushed.
        """
        with self._waiting_requests_hidden():
            if self.scheduler.flush_cache(empty_cache=False):
                return
        running = len(self.scheduler.running_batch.reqs)
        raise EngineBusyError(
            f"{self._who}: the KV cache cannot be flushed: {running} running and "
            f"{len(self.scheduler.waiting_queue)} waiting requests; pause with mode 'retract', "
            "or set SGLANG_RDT_FLUSH=0 to keep their old cache"
        )

    @contextlib.contextmanager
    def _waiting_requests_hidden(self) -> Iterator[None]:
        # Up to 0.5.20 flush_cache wants an empty waiting queue even while paused. Requests that
        # wait after a retract own no cache, which is what 0.5.21 checks instead.
        if self.has_session:
            yield
            return
        waiting, self.scheduler.waiting_queue = self.scheduler.waiting_queue, []
        try:
            yield
        finally:
            self.scheduler.waiting_queue = waiting

    def refuse_unsupported_model(self, runner: str = "target") -> None:
        """Raises EngineStateError for weights that cannot be loaded again, naming them all.

        Args:
            runner: what is to be synced.
        """
        problems = [
            problem
            for _, model, updater in runners.models(self.scheduler, runner)
            for problem in [*self._problems(model), *_shared_with_a_daemon(updater)]
        ]
        if problems:
            raise EngineStateError(
                f"{self._who}: its weights cannot be loaded again, so it must be started in another "
                f"way (docs/quantised.md): {'; '.join(problems)}"
            )

    def _problems(self, model: torch.nn.Module) -> list[str]:
        problems = [*quantised.problems(model), *derived.problems(model)]
        if hasattr(model, "original_weights_rebuild_keys"):
            problems.append("load_format=flash_rl quantises in its own loader; start without it")
        with contextlib.suppress(ImportError):  # since 0.5.17
            from sglang.srt.model_executor.model_runner_components.weight_updater import (
                _unsupported_derived_weight_cache_error as derived_weight_error,
            )

            problems += [why for why in [derived_weight_error(model)] if why]
        return problems

    def begin_session(self, selector: str = "target") -> None:
        """Brings packed weights into their loadable form; nothing if a session is open.

        Args:
            selector: whose, in SGLang's words: ``target``, ``draft`` or ``all``.

        Raises:
            EngineStateError: a session of other models is open.

        What ``weight_updater.begin_weight_update`` does, without its barrier: the ranks vote
        afterwards, and a barrier would keep the others waiting for one that failed.
        Source: sglang/srt/managers/scheduler_components/weight_updater.py, 0.5.21 to 0.5.23.
        """
        if not self.has_session:
            return
        if self.session_open:
            other = self.scheduler.weight_updater._session.selector
            if other not in (selector, "all"):
                raise EngineStateError(
                    f"{self._who}: a session of {other!r} is open; only a sync of that can end it"
                )
            return
        from sglang.srt.managers.scheduler_components.weight_updater import _WeightUpdateSession

        updater = self.scheduler.weight_updater
        for _, runner in updater._select_runners(selector):
            runner.weight_updater.begin_weight_update()
        updater._session = _WeightUpdateSession(selector=selector)

    @property
    def session_open(self) -> bool:
        """Whether a weight-update session is open, by whomever."""
        return self.has_session and self.scheduler.weight_updater._session is not None

    def end_session(self, *, changed: bool = True) -> None:
        """Derives and packs what is made of the weights, once. No barrier, see begin_session.

        Args:
            changed: whether weights were written. If not, what is derived of them is right as it
                is; and quantised ones could not be derived of again.

        Raises:
            EngineStateError: no session is open.
        """
        if not self.has_session:
            if changed:
                from sglang.srt.model_loader import loader

                loader._post_load_weights(self.model)
            caches.refresh(self.model)
            return
        updater = self.scheduler.weight_updater
        if updater._session is None:
            raise EngineStateError(f"{self._who}: no weight-update session is open")
        for _, runner in updater._select_runners(updater._session.selector):
            runner.weight_updater.end_weight_update(
                run_post_load=changed and not updater._session.loaded_weights
            )
        updater._session = None
        # Whatever was written, torn weights that a user accepts too: a copy of the same is the same.
        for _, model, _ in runners.models(self.scheduler, "both"):
            caches.refresh(model)

    @property
    def version(self) -> str:
        """The version label that replies carry now."""
        if hasattr(self.scheduler, "record_weight_version_change"):
            from sglang.srt.runtime_context import get_serving

            return str(get_serving().weight_version)
        if self._version is not None:
            return self._version
        return str(self.scheduler.server_args.weight_version)

    def set_version(self, version: str) -> None:
        """Labels everything generated from now on."""
        if hasattr(self.scheduler, "record_weight_version_change"):
            self.scheduler.record_weight_version_change(new_version=version)
        self._version = version
        if self._label_replies:
            from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

            # Ranks that talk to no tokenizer manager have no socket, and send nothing.
            self.scheduler.ipc_channels.send_to_tokenizer.send_output(
                UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
            )

    def drain(self) -> None:
        """Waits for forward passes under way, which still read the weights, and takes their tokens
        in, which the old version made.

        For the scheduler's own streams, and the device as a whole only where it has none: after a
        sync UCX keeps the device busy for a while with work that touches no weight.
        Source: sglang/srt/managers/scheduler.py (forward_stream, schedule_stream, copy_stream).
        """
        self._take_results()
        if self.device.type != "cuda":
            return
        streams = [v for v in vars(self.scheduler).values() if isinstance(v, torch.cuda.Stream)]
        if not hasattr(self.scheduler, "forward_stream"):
            torch.cuda.synchronize(self.device)
            return
        for stream in [
            *streams,
            torch.cuda.default_stream(self.device),
            torch.cuda.current_stream(self.device),
        ]:
            stream.synchronize()

    def _take_results(self) -> None:
        """Gives requests the tokens of the latest pass, before the version changes.

        With the overlap schedule they wait in a queue for the next turn of the loop. A pause with
        ``retract`` takes them; one in place leaves them there, and they would be labelled with the
        version that follows. The loop still finds an entry for each pass, as it expects.
        Source: sglang/srt/managers/scheduler.py (event_loop_overlap, pause_generation), the same
        in this from 0.5.16 to 0.5.23.
        """
        queue = getattr(self.scheduler, "result_queue", None)
        if not queue:
            return
        process = self.scheduler.process_batch_result
        if not self._skips_taken:

            def process_once(batch: Any, result: Any) -> Any:
                return None if hasattr(batch, _TAKEN) else process(batch, result)

            self.scheduler.process_batch_result = process_once
            self._skips_taken = True
        for batch, result in queue:
            self.scheduler.process_batch_result(batch, result)
            # The queue's own copy. SGLang looks into it for requests that need no more passes.
            batch.reqs, batch.has_grammar = [], False
            setattr(batch, _TAKEN, True)

    def synchronize(self) -> None:
        """Waits for what this thread has started (constants, copies, post-load processing).

        Not for the whole device: NIXL's bytes are there when a pull returns, but UCX keeps the
        device busy for another 17 to 22 ms per 16 GB with work that touches neither side.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _shared_with_a_daemon(updater: Any) -> list[str]:
    """SGLang's own word on weights that are another process's memory (its weight cache)."""
    check = getattr(updater, "_assert_weight_cache_inactive", None)
    if check is None:
        return []
    try:
        check("a weight sync")
    except RuntimeError as error:
        return [str(error)]
    return []
