"""Which transports there are."""

from collections.abc import Callable

from narrows.errors import ConfigError
from narrows.transfer.base import Transport, TransportConfig
from narrows.transfer.loopback import LoopbackHub, LoopbackTransport
from narrows.transfer.null import NullTransport
from narrows.transfer.shm import ShmTransport
from narrows.transfer.tcp import TcpTransport

_IN_PROCESS: dict[str, Callable[[TransportConfig, LoopbackHub], Transport]] = {
    "null": NullTransport,
    "loopback": LoopbackTransport,
}
_BETWEEN_PROCESSES: dict[str, Callable[[TransportConfig], Transport]] = {
    "tcp": TcpTransport,
    "shm": ShmTransport,
}

KINDS = (*_IN_PROCESS, *_BETWEEN_PROCESSES)


def open_transport(kind: str, config: TransportConfig, *, hub: LoopbackHub | None = None) -> Transport:
    """A new transport, listening. Transports within one process (null, loopback) meet in `hub`; others ignore it.

    Raises ConfigError for an unknown kind or a setting that can not work here.
    """
    if kind in _BETWEEN_PROCESSES:
        return _BETWEEN_PROCESSES[kind](config)
    if kind not in _IN_PROCESS:
        raise ConfigError(f"transport: {kind!r} is not known; choose one of {', '.join(KINDS)}")
    if hub is None:
        raise ConfigError(f"transport: {kind} joins transports of one process; give them the same LoopbackHub")
    return _IN_PROCESS[kind](config, hub)
