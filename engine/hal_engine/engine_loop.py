"""The engine as the server sees it: a thread that steps, and asyncio streams that listen.

One thread owns the scheduler and the runner. Everything else reaches it through an inbox of
callables that it runs between steps; what a step produced reaches the event loop in one call. An
idle engine blocks on the inbox. Whatever the runner raises ends the engine: every live request gets
an error event, every later call raises EngineDeadError with that cause.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hal_engine.admission import check_request, check_token_ids
from hal_engine.api import (
    EngineDeadError,
    EngineStats,
    Failure,
    FinishReason,
    GenerationRequest,
    OpCallCount,
    QueueFullError,
    RequestRefusedError,
    TokenEvent,
    Tokenizer,
)
from hal_engine.batch import ModelRunner
from hal_engine.compute_thread import ComputeThread
from hal_engine.engine_core import EngineCore, Events, make_event
from hal_engine.event_streams import EventStream, Reply, deliver
from hal_engine.scheduler import SchedulerConfig
from hal_engine.structured_output import GrammarCompiler, GrammarLimits, GrammarMatcher

logger = logging.getLogger(__name__)


class Engine:
    """Implements `api.AsyncEngine`. Owns `runner` and `tokenizer` from now on and closes them."""

    def __init__(
        self,
        model_id: str,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        scheduler_config: SchedulerConfig,
        *,
        plan_json: Mapping[str, Any],
        degraded_reasons: Sequence[str] = (),
        op_calls: Callable[[], Sequence[OpCallCount]],
        grammar_limits: GrammarLimits | None = None,
        thread: ComputeThread | None = None,
        audit_report: Callable[[], str] | None = None,
    ) -> None:
        """thread: the one that built the runner, which then becomes the engine's."""
        self._model_id = model_id
        self._runner = runner
        self._tokenizer = tokenizer
        self._plan_json = dict(plan_json)
        self._degraded_reasons = tuple(degraded_reasons)
        self._op_calls = op_calls
        self._audit_report = audit_report
        self._config = scheduler_config
        self._core = EngineCore(runner, tokenizer, scheduler_config)
        self._compiler = GrammarCompiler(tokenizer, grammar_limits)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live_ids: set[str] = set()
        self._counter_lock = threading.Lock()  # several event loops may submit
        self._num_entering = 0  # requests between generate() and the inbox
        self._num_sent = 0  # submissions put into the inbox
        # The rest belongs to the engine thread; others read _num_taken and _death.
        self._num_taken = 0  # submissions taken out
        self._streams: dict[int, EventStream] = {}
        self._embeddings: deque[tuple[Sequence[int], Reply[list[float]]]] = deque()
        self._probes: list[Reply[None]] = []
        self._drains: list[Reply[None]] = []
        self._closing = False
        self._death: BaseException | None = None
        self._close_error: Exception | None = None
        self._thread = (thread or ComputeThread()).become(self._run)

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def supports_embeddings(self) -> bool:
        return self._runner.supports_embeddings

    def plan_json(self) -> dict[str, Any]:
        return self._plan_json

    def plan_hash(self) -> str:
        return str(self._plan_json["hash"])

    def degraded_reasons(self) -> Sequence[str]:
        return self._degraded_reasons

    def op_calls(self) -> Sequence[OpCallCount]:
        return self._op_calls()

    def audit_report(self) -> str | None:
        return None if self._audit_report is None else self._audit_report()

    def stats(self) -> EngineStats:
        """Raises EngineDeadError once the engine has ended: its last numbers are no news."""
        self._raise_if_dead()
        return self._core.stats()

    # ---- called from event loops ----

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """See `api.AsyncEngine.generate`. Raises when the first event is asked for."""
        self._raise_if_dead()
        arrival_s = time.monotonic()
        request_id = request.request_id
        if request_id in self._live_ids:
            raise RequestRefusedError(f"request_id {request_id!r} is in use by a live request")
        check_request(request, vocab_size=self._runner.vocab_size, max_model_len=self.max_model_len)
        self._core.refuse_if_too_long(request)
        self._raise_if_full()
        stream = EventStream(asyncio.get_running_loop())
        self._live_ids.add(request_id)
        try:
            await self._enter(request, arrival_s, stream)
            while not stream.has_ended:
                yield await stream.next()
        finally:
            self._live_ids.discard(request_id)
            if not stream.has_ended:
                self._inbox.put(partial(self._cancel, stream))

    async def _enter(
        self, request: GenerationRequest, arrival_s: float, stream: EventStream
    ) -> None:
        """Compiles the grammar, if any, and submits."""
        with self._counter_lock:
            self._num_entering += 1
        try:
            grammar = None
            if request.grammar is not None:
                grammar = await self._compiler.compile(request.grammar)
                self._raise_if_full()  # others came in meanwhile
            with self._counter_lock:
                self._num_sent += 1
            self._inbox.put(partial(self._submit, request, grammar, arrival_s, stream))
            self._raise_if_dead()
        finally:
            with self._counter_lock:
                self._num_entering -= 1

    def _raise_if_full(self) -> None:
        scheduler = self._core.scheduler
        num_running = len(scheduler.running)
        waiting = len(scheduler.waiting) + self._num_sent - self._num_taken
        # With nobody waiting, a free place in the batch is taken at once.
        free_places = 0 if scheduler.waiting else self._config.max_num_seqs - num_running
        if waiting < self._config.max_waiting + free_places:
            return
        # Little's law: the queue moves by num_running every service_s. Half of it is a time at
        # which a client has a good chance, without all coming back at the very end.
        turn_s = waiting * self._core.service_s / max(num_running, 1)
        raise QueueFullError(waiting, self._config.max_waiting, min(max(turn_s / 2, 1.0), 600.0))

    async def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """One forward per sequence, between steps. Raises RequestRefusedError, EngineDeadError."""
        self._raise_if_dead()
        if not self.supports_embeddings:
            raise RequestRefusedError(f"model {self._model_id} does not give embeddings")
        for ids in token_ids:
            check_token_ids("input", ids, self._runner.vocab_size)
            if len(ids) > self.max_model_len:
                raise RequestRefusedError(
                    f"input: at most {self.max_model_len} tokens, found {len(ids)}"
                )
        loop = asyncio.get_running_loop()
        replies = [Reply[list[float]](loop) for _ in token_ids]
        for ids, reply in zip(token_ids, replies, strict=True):
            self._inbox.put(partial(self._embeddings.append, (ids, reply)))
        self._raise_if_dead()
        return list(await asyncio.gather(*(reply.future for reply in replies)))

    async def check_ready(self, deadline_s: float) -> None:
        """A forward within the deadline: a dummy when idle, the next real step when busy.

        Raises EngineDeadError, or TimeoutError.
        """
        self._raise_if_dead()
        reply = Reply[None](asyncio.get_running_loop())
        self._inbox.put(partial(self._probes.append, reply))
        self._raise_if_dead()
        try:
            await asyncio.wait_for(reply.future, deadline_s)
        except TimeoutError:
            raise TimeoutError(
                f"engine: a forward must end within {deadline_s:g} s, none did"
            ) from None

    async def drain(self) -> None:
        """Returns when no request is running or waiting. New ones are the caller's to refuse."""
        while self._death is None:
            reply = Reply[None](asyncio.get_running_loop())
            self._inbox.put(partial(self._drains.append, reply))
            if self._death is not None:
                return
            await reply.future
            if not self._num_entering:
                return
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ends live requests as cancelled, stops the thread, closes the runner and the tokenizer.

        Idempotent. Raises what closing them raises.
        """
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join)
        self._compiler.close()
        await asyncio.to_thread(self._tokenizer.close)
        if self._close_error is not None:
            error, self._close_error = self._close_error, None
            raise error

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._dead_error() from self._death

    def _dead_error(self) -> EngineDeadError:
        if isinstance(self._death, EngineDeadError):  # closed, not failed
            return EngineDeadError(str(self._death))
        return EngineDeadError(
            f"engine: ended by {type(self._death).__name__}: {self._death}; restart the server"
        )

    # ---- on the engine thread ----

    def _run(self) -> None:
        import torch

        try:
            with torch.inference_mode():
                self._step_until_closed()
            self._end(EngineDeadError("engine: it was closed"), "cancelled")
        except BaseException as error:
            logger.exception("engine: the loop ends, every live request gets an error")
            self._end(error, "error")
        try:
            self._runner.close()
        except Exception as error:
            logger.exception("engine: closing the model runner failed")
            self._close_error = error

    def _step_until_closed(self) -> None:
        core = self._core
        while True:
            self._take_commands(wait=not (core.has_work or self._embeddings or self._probes))
            if self._closing:
                return
            if core.has_work:
                num_steps = core.num_steps
                self._publish(core.step())
                if self._probes and core.num_steps > num_steps:
                    self._answer_probes(None)
            elif self._probes:
                self._probe()
            if self._embeddings:
                self._embed_one()
            if self._drains and not core.has_work and self._num_sent == self._num_taken:
                for reply in self._drains:
                    reply.set_result(None)
                self._drains.clear()

    def _take_commands(self, wait: bool) -> None:
        inbox = self._inbox
        if wait and not self._drains:
            inbox.get()()
        while not inbox.empty():
            inbox.get()()

    def _submit(
        self,
        request: GenerationRequest,
        grammar: GrammarMatcher | None,
        arrival_s: float,
        stream: EventStream,
    ) -> None:
        self._num_taken += 1
        seq = self._core.submit(request, grammar, arrival_s)
        stream.sequence = seq
        self._streams[seq.seq_id] = stream

    def _cancel(self, stream: EventStream) -> None:
        seq = stream.sequence
        if seq is not None and self._streams.pop(seq.seq_id, None) is not None:
            self._core.cancel(seq)

    def _stop(self) -> None:
        self._closing = True

    def _publish(self, events: Events) -> None:
        streams = self._streams
        pairs: list[tuple[EventStream, TokenEvent]] = []
        for seq, event in events:
            stream = streams[seq.seq_id]
            pairs.append((stream, event))
            if event.finish_reason is not None:
                del streams[seq.seq_id]
        for stream in deliver(pairs):  # its event loop is gone: nobody listens any more
            self._cancel(stream)

    def _probe(self) -> None:
        if self._core.run_dummy():
            self._answer_probes(None)
        else:
            self._answer_probes(
                EngineDeadError("engine: the logits of a dummy forward are not finite")
            )

    def _answer_probes(self, error: EngineDeadError | None) -> None:
        for reply in self._probes:
            if error is None:
                reply.set_result(None)
            else:
                reply.set_exception(error)
        self._probes.clear()

    def _embed_one(self) -> None:
        token_ids, reply = self._embeddings.popleft()
        if not reply.is_abandoned:
            reply.set_result(self._runner.embed([token_ids])[0])

    def _end(self, cause: BaseException, reason: FinishReason) -> None:
        """Marks the engine dead, then answers everyone who waits."""
        self._death = cause
        # A caller puts into the inbox first and looks at _death second: either it is found here,
        # or it finds the mark.
        while not self._inbox.empty():
            self._inbox.get()()
        error = self._dead_error()
        failure = Failure("engine", str(error)) if reason == "error" else None
        # Not through the core: its books may be what failed.
        deliver(
            [
                (stream, make_event(stream.sequence, None, "", None, reason, failure))
                for stream in self._streams.values()
                if stream.sequence is not None
            ]
        )
        self._core.scheduler.forget_all()
        for reply in self._probes:
            reply.set_exception(error)
        for _, embedding in self._embeddings:
            embedding.set_exception(error)
        for reply in self._drains:
            reply.set_result(None)
