"""TCP between machines: frames on one connection, payload straight from region to region."""

import socket

from narrows.errors import ConfigError, TransportError
from narrows.transfer.base import TransportConfig
from narrows.transfer.engine import Engine
from narrows.transfer.memory import allocate_private

_WILDCARDS = ("", "0.0.0.0", "::")
_UNSENT_BYTES = 128 * 1024  # in the kernel but not on the wire; what an urgent frame may find ahead of it there
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
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def _allocate(self, num_bytes: int) -> memoryview:
        return allocate_private(num_bytes)
