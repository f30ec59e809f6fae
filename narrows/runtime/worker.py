"""The process of one instance: `python -m narrows.runtime.worker`, its WorkerSpec as one JSON line on standard input.

Standard input stays open as a leash: when the parent dies, by whatever means, it closes and so does this process.
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import zmq

from narrows.config import EngineConfig
from narrows.core.ids import InstanceId, Role
from narrows.core.trace import Tracer
from narrows.core.wire import Heartbeat, Ready, Refused, Shutdown, ToInstance
from narrows.errors import NarrowsError
from narrows.kernels import load as load_kernels
from narrows.models.spec import read_spec
from narrows.runtime.build import build_instance, build_model
from narrows.runtime.channel import ZmqChannel
from narrows.runtime.dtypes import DTYPES
from narrows.runtime.files import ProfileFiles
from narrows.runtime.handing import open_handing
from narrows.runtime.phase import Instance
from narrows.runtime.prefill import PrefillPhase
from narrows.runtime.sizing import plan_sizes
from narrows.transfer.base import BLOCK_BYTES, Transport, TransportConfig
from narrows.transfer.registry import open_transport

HEARTBEAT_S = 1.0
BLOCK_S = 0.001
LEAST_BLOCK = 4096
IDLE_POLL_MS = 1000


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker process is told."""

    config: EngineConfig
    folder: str
    role: Role
    name: InstanceId
    incarnation: str
    hub: str  # address of the control channel
    transport: str
    secret: str
    files: ProfileFiles
    verbose: bool  # log what is decided and not warnings alone


class StoppableChannel:
    """Sees Shutdown before the phase does."""

    def __init__(self, channel: ZmqChannel) -> None:
        self.send = channel.send
        self._channel = channel
        self.stopped = False

    def receive(self) -> list[ToInstance]:
        messages = self._channel.receive()
        self.stopped = self.stopped or any(isinstance(message, Shutdown) for message in messages)
        return messages


def main() -> None:
    """Serve until told to stop. Exits 1 after reporting why it could not start or go on."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    level = logging.INFO if spec.verbose else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = ZmqChannel(context, spec.hub, spec.name, spec.incarnation)
    stop = threading.Event()
    pulse = threading.Thread(target=_pulse, args=(context, spec, stop), daemon=True)
    pulse.start()
    code = 0
    try:
        _serve(spec, channel)
    except NarrowsError as error:
        channel.send(Refused(str(error)))
        code = 1
    except Exception:
        traceback.print_exc()
        channel.send(Refused(f"{spec.name} failed: {traceback.format_exc(limit=-1).strip()}"))
        code = 1
    stop.set()
    pulse.join()
    channel.close()
    context.term()
    sys.stderr.flush()
    os._exit(code)  # transports' native libraries may not survive an ordinary exit


def _serve(spec: WorkerSpec, channel: ZmqChannel) -> None:
    threads = spec.config.threads or torch.get_num_threads()
    kernels = load_kernels(spec.config.kernels, threads)
    torch.set_num_threads(threads if kernels.relies_on_torch(DTYPES[spec.config.dtype]) else 1)
    model_spec = read_spec(Path(spec.folder))
    sizes = plan_sizes(spec.config, model_spec)
    transport = open_transport(
        spec.transport,
        TransportConfig(
            name=f"{spec.name}/{spec.incarnation}",
            link_gbps=spec.config.link_gbps,
            checksums=spec.config.checksums,
            block_bytes=block_bytes(spec.config.link_gbps),
            secret=spec.secret,
        ),
    )
    try:
        model, attention = build_model(spec.config, spec.folder, sizes, kernels)
        stoppable = StoppableChannel(channel)
        instance, info = build_instance(
            spec.config,
            sizes,
            model,
            attention,
            role=spec.role,
            name=spec.name,
            incarnation=spec.incarnation,
            transport=transport,
            channel=stoppable,
            handing=open_handing(spec.config, model_spec, kernels, spec.files),
            tracer=None if spec.config.trace is None else Tracer(time.monotonic),
        )
        channel.send(Ready(info))
        _loop(instance, stoppable, channel)
        if isinstance(instance.phase, PrefillPhase):
            instance.phase.courier.closed = True
    finally:
        transport.close()


def block_bytes(link_gbps: float | None) -> int:
    """Largest frame: on a slow link what crosses in BLOCK_S, so that what a step waits for never waits long itself."""
    if link_gbps is None:
        return BLOCK_BYTES
    return max(LEAST_BLOCK, min(BLOCK_BYTES, int(link_gbps * 1e9 / 8 * BLOCK_S) // 1024 * 1024))


def _loop(instance: Instance, stoppable: StoppableChannel, channel: ZmqChannel) -> None:
    """Turns until told to stop. Prefill's link is served by a thread of its own, also while this one computes."""
    poller = zmq.Poller()
    poller.register(channel.socket, zmq.POLLIN)
    if isinstance(instance.phase, PrefillPhase):
        poller.register(instance.phase.courier.news.fileno(), zmq.POLLIN)
        threading.Thread(target=_serve_link, args=(instance.phase, instance.transport), daemon=True).start()
    else:
        poller.register(instance.transport.fileno(), zmq.POLLIN)
        instance.pause = lambda timeout_s: _poll(poller, timeout_s)
    while not stoppable.stopped:
        if not instance.turn():
            poller.poll(IDLE_POLL_MS)


def _poll(poller: zmq.Poller, timeout_s: float) -> None:
    poller.poll(max(1, int(timeout_s * 1000)))


def _serve_link(phase: PrefillPhase, transport: Transport) -> None:
    try:
        while True:
            select.select([transport.fileno()], [], [])
            phase.courier.serve()
    except Exception:  # a bug, or the transport failed: the instance can not hand over any more
        if phase.courier.closed:
            return
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _pulse(context: "zmq.Context[zmq.Socket[bytes]]", spec: WorkerSpec, stop: threading.Event) -> None:
    """Says that the process is alive while the main thread computes. A socket of its own: they are not shared."""
    channel = ZmqChannel(context, spec.hub, spec.name, spec.incarnation, part="pulse")
    while not stop.wait(HEARTBEAT_S):
        channel.send(Heartbeat())
    channel.close()


def _exit_with_parent() -> None:
    with contextlib.suppress(OSError):
        while sys.stdin.buffer.read(4096):
            pass
    os._exit(0)


if __name__ == "__main__":
    main()
