"""Which transports there are."""

from collections.abc import Callable

from narrows.errors import ConfigError
from narrows.transfer.base import Transport, TransportConfig
from narrows.transfer.loopback import LoopbackHub, LoopbackTransport
from narrows.transfer.null import NullTransport
from narrows.transfer.tcp import TcpTransport


def _open_tcp(config: TransportConfig, hub: LoopbackHub) -> Transport:
    return TcpTransport(config)


_OPEN: dict[str, Callable[[TransportConfig, LoopbackHub], Transport]] = {
    "null": NullTransport,
    "loopback": LoopbackTransport,
    "tcp": _open_tcp,
}

KINDS = tuple(_OPEN)


def open_transport(kind: str, config: TransportConfig, *, hub: LoopbackHub | None = None) -> Transport:
    """A new transport, listening. Transports within one process (null, loopback) meet in `hub`; others ignore it.

    Raises ConfigError for an unknown kind or a setting that can not work here.
    """
    if kind not in _OPEN:
        raise ConfigError(f"transport: {kind!r} is not known; choose one of {', '.join(KINDS)}")
    if hub is None:
        if kind in ("null", "loopback"):
            raise ConfigError(f"transport: {kind} joins transports of one process; pass them the same LoopbackHub")
        hub = LoopbackHub()
    return _OPEN[kind](config, hub)
