"""A whole cluster in one process and one thread: the real coordinator, phases and transport, turned by hand.

What runs here is what runs between processes; only the launcher and the sockets of the control channel are left out.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from narrows.attention.base import PagedAttention
from narrows.config import EngineConfig
from narrows.core.clock import MonotonicClock
from narrows.core.events import Event
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request
from narrows.core.wire import Ready
from narrows.models.layers.decoder import Model
from narrows.models.spec import read_spec
from narrows.runtime.build import build_instance, build_model
from narrows.runtime.channel import MemoryHub
from narrows.runtime.client import Output
from narrows.runtime.coordinator import Coordinator
from narrows.runtime.handing import Handing
from narrows.runtime.phase import Instance
from narrows.runtime.prefill import PrefillPhase
from narrows.runtime.sizing import plan_sizes
from narrows.sched.registry import make_policy
from narrows.transfer.base import BLOCK_BYTES, Transport, TransportConfig
from narrows.transfer.loopback import LoopbackHub
from narrows.transfer.registry import open_transport

MOST_TURNS = 200_000


class MemoryCluster:
    """`config.prefill` and `config.decode` instances over one shared copy of the weights. Use as a context manager.

    `transport` names the kind; `wrap` may put a fault injector around each instance's transport.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        *,
        transport: str = "loopback",
        wrap: Callable[[InstanceId, Transport], Transport] = lambda _name, transport: transport,
        loaded: tuple[Model, PagedAttention] | None = None,
        handing: Handing | None = None,  # None: full transfer, decode reads all KV
        frames: Callable[[], int] | None = None,  # how many frames of a KiB move in each turn; None: all
    ) -> None:
        self.config = config
        self.handing = handing or Handing()
        self.sizes = plan_sizes(config, read_spec(folder))
        self.loaded = loaded or build_model(config, str(folder), self.sizes)
        self.clock = MonotonicClock()
        self.events: list[Event] = []
        self.outputs: dict[str, list[Output]] = defaultdict(list)
        self.coordinator = Coordinator(
            make_policy(config.policy, local=True),
            replays=self.handing.selector is not None,
            max_queue=config.max_queue,
            max_model_len=self.sizes.max_model_len,
            vocab_size=self.loaded[0].spec.vocab_size,
            observe=self.events.append,
        )
        self.instances: dict[InstanceId, Instance] = {}
        self._hub = MemoryHub()
        self._transport_hub = LoopbackHub()
        self._kind = transport
        self._wrap = wrap
        self._frames = frames
        self._block_bytes = BLOCK_BYTES if frames is None else 1024
        if frames is not None:
            self._transport_hub.pause()
        self._incarnations = 0
        for role, count in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for i in range(count):
                self.start(InstanceId(f"{role}-{i}"), role)

    def start(self, name: InstanceId, role: Role) -> None:
        """Start an instance, or start it again after `kill`."""
        self._incarnations += 1
        incarnation = str(self._incarnations)
        transport = open_transport(
            self._kind,
            TransportConfig(f"{name}/{incarnation}", link_gbps=self.config.link_gbps, block_bytes=self._block_bytes),
            hub=self._transport_hub,
        )
        channel = self._hub.channel(name)
        self.instances[name], info = build_instance(
            self.config,
            self.sizes,
            *self.loaded,
            role=role,
            name=name,
            incarnation=incarnation,
            transport=self._wrap(name, transport),
            channel=channel,
            handing=self.handing,
            clock=self.clock.now,
        )
        self.instances[name].pause = lambda _timeout_s: self.between(name)
        channel.send(Ready(info))

    def kill(self, name: InstanceId) -> None:
        """The instance is gone between two turns, as by kill -9, and the coordinator hears of it."""
        self.instances.pop(name).transport.close()
        self._hub.channel(name)
        self.coordinator.instance_lost(name, "killed", self.clock.now())

    def submit(self, request: Request) -> None:
        self.coordinator.submit(request, self.outputs[request.id].append, self.clock.now())

    def abort(self, request: str) -> None:
        self.coordinator.abort(RequestId(request), self.clock.now())

    def deliver(self) -> None:
        """The coordinator takes in what instances have said."""
        for name, message in self._hub.receive():
            self.coordinator.receive(name, message, self.clock.now())

    def turn(self) -> bool:
        """One turn of everybody; False when nobody had anything to do."""
        self.deliver()
        busy = bool(self.coordinator.outbox)
        while self.coordinator.outbox:
            self._hub.send(*self.coordinator.outbox.popleft())
        for instance in list(self.instances.values()):
            busy = instance.turn() or busy
        return self._move() or busy

    def between(self, waiting: InstanceId) -> None:
        """An instance waits in the middle of its step: what runs beside it in other processes does so here. Others
        serve their links (as prefill's second thread does) and messages cross; nobody computes."""
        self.deliver()
        while self.coordinator.outbox:
            self._hub.send(*self.coordinator.outbox.popleft())
        for name, instance in list(self.instances.items()):
            if name != waiting and isinstance(instance.phase, PrefillPhase):
                instance.phase.courier.serve()
        self._move()
        if self._kind not in ("loopback", "null"):
            time.sleep(0.0005)  # their transports have threads

    def _move(self) -> bool:
        """What the link carries in a turn; False when nothing waited."""
        if self._frames is None:
            self._transport_hub.settle()
            return False
        return sum(self._transport_hub.step() for _ in range(self._frames())) > 0

    def run(self) -> None:
        """Turn until every request has ended and nothing is held anywhere."""
        for _ in range(MOST_TURNS):
            busy = self.turn()
            if not busy and not self.coordinator.num_live and not self.coordinator.num_holds:
                return
        raise AssertionError(f"{self.coordinator.num_live} requests live, {self.coordinator.num_holds} attempts held")

    def generate(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Submit all at once and return the tokens of each; every one must end by itself."""
        for request in requests:
            self.submit(request)
        self.run()
        for request in requests:
            assert self.ending(request.id) in (FinishReason.STOP, FinishReason.LENGTH), self.outputs[request.id][-1]
        return [self.tokens(request.id) for request in requests]

    def tokens(self, request: str) -> tuple[int, ...]:
        return tuple(token.id for output in self.outputs[request] for token in output.tokens)

    def ending(self, request: str) -> FinishReason:
        """How the request ended; it must have, exactly once."""
        (reason,) = [o.finish_reason for o in self.outputs[request] if o.finish_reason is not None]
        return reason

    def close(self) -> None:
        for instance in self.instances.values():
            instance.transport.close()

    def __enter__(self) -> "MemoryCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
