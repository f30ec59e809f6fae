"""What prefill and decode instances have in common: the turn, the report, the sampling of a step."""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from narrows.core.request import FinishReason, Request, SampledToken
from narrows.core.trace import Tracer
from narrows.core.wire import (
    Delivered,
    Failed,
    Load,
    Produced,
    Progress,
    Released,
    Reserved,
    Started,
    ToInstance,
    Traced,
)
from narrows.runtime.channel import Channel
from narrows.runtime.sampler import BrokenLogits, SamplingRow, sample
from narrows.runtime.stopping import finish_reason
from narrows.transfer.base import Transport


@dataclass(slots=True)
class Report:
    """Gathers what one turn has to say."""

    reserved: list[Reserved] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    produced: list[Produced] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)

    def take(self, load: Load) -> Progress | None:
        """The turn's message, or None when there is nothing to say; the report is empty again."""
        parts = (self.reserved, self.started, self.produced, self.failed, self.released, self.delivered)
        if not any(parts):
            return None
        progress = Progress(
            tuple(self.reserved),
            tuple(self.started),
            tuple(self.produced),
            tuple(self.failed),
            tuple(self.released),
            tuple(self.delivered),
            load,
        )
        for part in parts:
            part.clear()
        return progress


@dataclass(frozen=True, slots=True)
class Ending:
    """What sampling needs to know of the model to end requests."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> "list[Choice | str]":
        """One token for each row of logits [n, V], sampled unless it is known, and whether it is the request's last; an
        error text where the model's output is broken."""
        rows = [SamplingRow(r.params, r.params.seed or 0, r.prompt, r.output, self.eos_token_ids) for r in requests]
        broken: tuple[int, ...] = ()
        try:
            sampled = iter(sample(logits, rows))
        except BrokenLogits as error:
            broken = error.rows
            good = [i for i in range(len(rows)) if i not in broken]
            sampled = iter(sample(logits[good], [rows[i] for i in good]))
        return [
            "the model produced NaN or infinite logits" if i in broken else self._judge(request, next(sampled))
            for i, request in enumerate(requests)
        ]

    def _judge(self, request: Request, token: SampledToken) -> "Choice":
        if len(request.output) < len(request.known):
            token = SampledToken(request.known[len(request.output)])
        reason = finish_reason(
            request.params,
            (*request.output, token.id),
            num_prompt=len(request.prompt),
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )
        return Choice(token, reason)


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, and why the request ends with it (None: it goes on)."""

    token: SampledToken
    finish_reason: FinishReason | None


class Phase(Protocol):
    """Prefill or decode: what an instance does with messages, transport events and its time."""

    report: Report
    instance: "Instance"  # set by it

    def handle(self, message: ToInstance) -> None: ...

    def is_urgent(self, message: ToInstance) -> bool:
        """Whether a message may and should be handled in the middle of a step."""
        ...

    def serve(self) -> bool:
        """Take in what the transport has; False when there was nothing."""
        ...

    def step(self) -> bool:
        """Run the model once on what is ready; False when nothing is."""
        ...

    def load(self) -> Load: ...


class Instance:
    """One phase with its link to the coordinator. `turn` blocks only to compute and, at decode, for KV of a step."""

    def __init__(self, phase: Phase, channel: Channel, transport: Transport, tracer: Tracer | None = None) -> None:
        self.phase = phase
        self.tracer = tracer
        self.channel = channel
        self.transport = transport
        self.pause: Callable[[float], None] = self._wait_for_transport
        self._later: list[ToInstance] = []
        phase.instance = self

    def turn(self) -> bool:
        """Take in what has come, compute one step, say what is new. False when there was nothing to do."""
        messages = [*self._later, *self.channel.receive()]
        self._later = []
        for message in messages:
            self.phase.handle(message)
        served = self.phase.serve()
        self._tell()  # answers do not wait for the step
        stepped = self.phase.step()
        self._tell()
        self.tell_trace()
        return bool(messages) or served or stepped

    def intake(self) -> None:
        """In the middle of a step: what is urgent is handled and answered, the rest waits for the next turn."""
        for message in self.channel.receive():
            if self.phase.is_urgent(message):
                self.phase.handle(message)
            else:
                self._later.append(message)
        self._tell()

    def wait(self, timeout_s: float) -> None:
        """In the middle of a step: until the transport may have something, at most so long; messages are taken in."""
        self.pause(timeout_s)
        self.intake()

    def _wait_for_transport(self, timeout_s: float) -> None:
        select.select([self.transport.fileno()], [], [], timeout_s)

    def tell_trace(self) -> None:
        if self.tracer is not None and (spans := self.tracer.take()):
            self.channel.send(Traced(spans))

    def _tell(self) -> None:
        progress = self.phase.report.take(self.phase.load())
        if progress is not None:
            self.channel.send(progress)
