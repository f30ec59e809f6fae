"""The control channel between the coordinator and its instances: small messages, reliable, in order.

`ZmqHub` and `ZmqChannel` connect processes; `MemoryHub` gives the same within one process. Messages are the dataclasses
of `core.wire`, encoded as MessagePack with their type's name, and checked against their types when decoded.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from narrows.core.ids import InstanceId
from narrows.core.wire import Refused, ToCoordinator, ToInstance
from narrows.errors import TransportError
from narrows.transfer.codec import decode, encode

MAX_MESSAGE_BYTES = 64 * 2**20  # a prompt of some ten million tokens


class Channel(Protocol):
    """An instance's end."""

    def send(self, message: ToCoordinator) -> None: ...

    def receive(self) -> list[ToInstance]:
        """All that has come; returns at once."""
        ...


class Hub(Protocol):
    """The coordinator's end, to all instances."""

    def send(self, instance: InstanceId, message: ToInstance) -> None: ...

    def receive(self) -> list[tuple[InstanceId, ToCoordinator]]:
        """All that has come, in order per instance; returns at once. What is no message counts as Refused."""
        ...

    def close(self) -> None: ...


class MemoryHub:
    """Both ends in one process, through the same encoding, so that what works here works between processes."""

    def __init__(self) -> None:
        self._to_instance: dict[InstanceId, deque[bytes]] = {}
        self._to_hub: deque[tuple[InstanceId, bytes]] = deque()

    def channel(self, instance: InstanceId) -> "MemoryChannel":
        """A fresh end for an instance; what was underway to an earlier one is gone, as with a process that died."""
        inbox = self._to_instance[instance] = deque()
        self._to_hub = deque(item for item in self._to_hub if item[0] != instance)
        return MemoryChannel(inbox, lambda frame: self._to_hub.append((instance, frame)))

    def send(self, instance: InstanceId, message: ToInstance) -> None:
        self._to_instance[instance].append(encode(message))

    def receive(self) -> list[tuple[InstanceId, ToCoordinator]]:
        frames, self._to_hub = self._to_hub, deque()
        return [(instance, decode(frame)) for instance, frame in frames]  # type: ignore[misc]

    def close(self) -> None:
        self._to_hub.clear()


class MemoryChannel:
    """See MemoryHub."""

    def __init__(self, inbox: deque[bytes], deliver: Callable[[bytes], None]) -> None:
        self._inbox = inbox
        self._deliver = deliver

    def send(self, message: ToCoordinator) -> None:
        self._deliver(encode(message))

    def receive(self) -> list[ToInstance]:
        return [decode(self._inbox.popleft()) for _ in range(len(self._inbox))]  # type: ignore[misc]


def _next(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """The next message's frames, or None when none has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class ZmqHub:
    """A ROUTER socket. Peers are known by "id/incarnation/part", so that a dead incarnation's words are not heard.

    An incarnation is a random number that only its own process was told, over a pipe: whoever else connects is not
    heard either. What does not look like a message is dropped and counted in `refused`.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str = "127.0.0.1") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.set_hwm(0)
        self.refused = 0
        self.address = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"
        self._incarnations: dict[InstanceId, str] = {}

    def expect(self, instance: InstanceId, incarnation: str | None) -> None:
        """From now on only this incarnation of the instance is heard and spoken to; None: nobody."""
        if incarnation is None:
            self._incarnations.pop(instance, None)
        else:
            self._incarnations[instance] = incarnation

    def send(self, instance: InstanceId, message: ToInstance) -> None:
        """Queue a message; to an instance that is gone it is dropped (the launcher reports the death)."""
        incarnation = self._incarnations.get(instance)
        if incarnation is None:
            return
        try:
            self.socket.send_multipart([f"{instance}/{incarnation}/main".encode(), encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> list[tuple[InstanceId, ToCoordinator]]:
        messages: list[tuple[InstanceId, ToCoordinator]] = []
        while (frames := _next(self.socket)) is not None:
            name, incarnation, _part = (*frames[0].decode(errors="replace").split("/"), "", "", "")[:3]
            known = self._incarnations.get(InstanceId(name))
            if known is None or known != incarnation or len(frames) != 2:
                self.refused += 1
                continue
            try:
                message = decode(frames[1])
            except TransportError as error:
                message = Refused(f"it sent {error}")
            messages.append((InstanceId(name), message))  # type: ignore[arg-type]
        return messages

    def close(self) -> None:
        self.socket.close()


class ZmqChannel:
    """A DEALER socket of an instance. Messages of the coordinator go to its part "main"."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        instance: InstanceId,
        incarnation: str,
        part: str = "main",
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"{instance}/{incarnation}/{part}".encode())
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.set_hwm(0)
        self.socket.connect(address)

    def send(self, message: ToCoordinator) -> None:
        self.socket.send(encode(message))

    def receive(self) -> list[ToInstance]:
        messages: list[ToInstance] = []
        while (frames := _next(self.socket)) is not None:
            messages.append(decode(frames[0]))  # type: ignore[arg-type]
        return messages

    def close(self) -> None:
        self.socket.close()
