"""TCP between machines: frames on one connection, payload straight from region to region."""

import socket

from narrows.errors import ConfigError, TransportError
from narrows.transfer.base import TransportConfig
from narrows.transfer.engine import Engine
from narrows.transfer.link import Link
from narrows.transfer.memory import allocate_private

_WILDCARDS = ("", "0.0.0.0", "::")
_BACKLOG = 128


class TcpTransport(Engine):
    """Addresses are `host:port`."""

    kind = "tcp"

    def __init__(self, config: TransportConfig) -> None:
        if config.listen in _WILDCARDS:
            raise ConfigError(
                f"transport.listen: {config.listen!r} is no address that peers can dial; "
                "name the host or interface address they reach"
            )
        super().__init__(config)

    def _listen(self) -> tuple[socket.socket, str]:
        host = self.config.listen
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"transport.listen: can not listen on {host!r}: {error}") from error
        port = listener.getsockname()[1]
        return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _dial(self, address: str, timeout_s: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise TransportError(f"address {address!r} is not host:port")
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _bound_unsent(self, link: Link) -> None:
        # The kernel calls a socket writable below half of this. On a slow link a quarter of a block is then ahead of
        # the next frame; on a fast one more, since its two ends sleep and wake less often for it.
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            unsent_bytes = link.pace.burst_bytes - self.config.block_bytes // 2
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)

    def _allocate(self, num_bytes: int) -> memoryview:
        return allocate_private(num_bytes)
