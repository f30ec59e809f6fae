"""A Client that lives in memory and follows a script: what the server and other front ends are tested against."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SampledToken, TokenLogprob
from narrows.errors import QueueFull, RequestError, Unavailable
from narrows.runtime.client import InstanceStatus, Output, ServedModel, Sink, Status

Step = int | tuple[int, ...] | Exception  # a token, several at once, or the failure of the request
Script = Callable[[Request], Iterable[Step]]


def echo(request: Request) -> Iterable[Step]:
    """Says the prompt again."""
    return request.prompt


@dataclass(slots=True)
class _Active:
    request: Request
    sink: Sink
    steps: Iterator[Step]
    num_tokens: int = 0


class FakeClient:
    """Each step gives every active request the next item of its script, from one thread of its own.

    A request ends with STOP when its script does, with LENGTH at max_tokens or max_model_len, with ERROR at an
    exception in the script. With `paused` nothing moves until `step` or `run`. `capacity` is how many requests may be
    active at once; `status_now` is what `status` returns and may be replaced. `submitted`, `aborted` and `ended`
    record what happened, in order.
    """

    def __init__(
        self, model: ServedModel, script: Script = echo, *, capacity: int = 1024, paused: bool = False
    ) -> None:
        self.model = model
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []
        self.ended: dict[RequestId, FinishReason] = {}
        instances = tuple(InstanceStatus(f"{role}-0", role, True, 0, 0, 0, 64) for role in ("prefill", "decode"))
        self.status_now = Status(ready=True, queued=0, instances=instances)
        self._script = script
        self._capacity = capacity
        self._permits = 0 if paused else None  # steps allowed; None: no limit
        self._active: dict[RequestId, _Active] = {}
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._loop, name="fake-client", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        with self._changed:
            if self._closed:
                raise Unavailable("the engine is closed")
            if not self.status_now.ready:
                raise Unavailable(self.status_now.reason)
            self._check(request)
            if len(self._active) >= self._capacity:
                raise QueueFull(f"{self._capacity} requests are active already")
            assert request.id not in self._active, f"{request.id} was submitted twice"
            self.submitted.append(request)
            self._active[request.id] = _Active(request, sink, iter(self._script(request)))
            self._changed.notify_all()

    def abort(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._changed:
            if active := self._active.get(request):
                self.aborted.append(request)
                self._end(active, reason)

    def status(self) -> Status:
        return self.status_now

    def metrics(self) -> str:
        with self._changed:
            return f"# TYPE narrows_requests_submitted counter\nnarrows_requests_submitted {len(self.submitted)}\n"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for active in list(self._active.values()):
                self._end(active, FinishReason.ABORT)
            self._changed.notify_all()
        self._thread.join()

    def step(self, num_steps: int = 1) -> None:
        """Allow that many more steps of a paused client; a step waits until some request is active."""
        with self._changed:
            assert self._permits is not None, "step is for a paused client"
            self._permits += num_steps
            self._changed.notify_all()

    def run(self) -> None:
        """Never pause again."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Block until `condition` holds; it is looked at whenever something has changed here."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "the fake client waited in vain"

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise RequestError("prompt", "is empty")
        if len(request.prompt) >= self.model.max_model_len:
            raise RequestError("prompt", f"has {len(request.prompt)} tokens; {self.model.max_model_len - 1} at most")
        if not all(0 <= token < self.model.vocab_size for token in request.prompt):
            raise RequestError("prompt", f"has a token outside 0..{self.model.vocab_size - 1}")

    def _loop(self) -> None:
        while self._step():
            time.sleep(0)  # lets others have the lock between two steps

    def _step(self) -> bool:
        """One step as soon as it is allowed; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._active and self._permits != 0))
            if self._closed:
                return False
            if self._permits is not None:
                self._permits -= 1
            for active in list(self._active.values()):
                self._advance(active)
            return True

    def _advance(self, active: _Active) -> None:
        step = next(active.steps, None)
        if step is None:
            self._end(active, FinishReason.STOP)
        elif isinstance(step, Exception):
            self._end(active, FinishReason.ERROR, error=str(step))
        else:
            limit = self.model.max_model_len - len(active.request.prompt)
            limit = min(limit, active.request.params.max_tokens or limit)
            ids = (step,) if isinstance(step, int) else step
            tokens = tuple(self._token(id, active.request) for id in ids[: limit - active.num_tokens])
            active.num_tokens += len(tokens)
            if active.num_tokens == limit:
                self._end(active, FinishReason.LENGTH, tokens)
            else:
                active.sink(Output(active.request.id, tokens))

    def _token(self, id: int, request: Request) -> SampledToken:
        """The chosen token has log probability -0.5, the next ids of the vocabulary -1.5, -2.5, ..."""
        num_best = request.params.logprobs
        if num_best is None:
            return SampledToken(id)
        best = tuple(((id + rank) % self.model.vocab_size, -0.5 - rank) for rank in range(num_best))
        return SampledToken(id, TokenLogprob(id, -0.5, best))

    def _end(
        self,
        active: _Active,
        reason: FinishReason,
        tokens: tuple[SampledToken, ...] = (),
        error: str | None = None,
    ) -> None:
        del self._active[active.request.id]
        self.ended[active.request.id] = reason
        active.sink(Output(active.request.id, tokens, reason, error=error))
        self._changed.notify_all()
