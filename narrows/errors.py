"""The exceptions Narrows raises on purpose. Everything else is a bug."""


class NarrowsError(Exception):
    """Root of the tree; catch this to catch all that Narrows reports to its user."""


class ConfigError(NarrowsError):
    """A setting is unusable. The text names the field and the fix: `decode.page_size: 48 is not ...`."""


class ModelError(NarrowsError):
    """A model folder or file can not be served: unsupported, incomplete, truncated or of a wrong shape."""


class RequestError(NarrowsError):
    """A request can not be served as asked (HTTP 400). `field` is the name its sender used."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class QueueFull(NarrowsError):
    """The waiting line is at its limit (HTTP 429); nothing of the request was kept."""


class Unavailable(NarrowsError):
    """No instance can serve now (HTTP 503): starting, lost or closing."""


class TransportError(NarrowsError):
    """A transport was used wrongly or its peer speaks another version."""


class PeerLost(TransportError):
    """The other side of a transport died or fell silent. `peer` is its name."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer} lost: {reason}")
        self.peer = peer
        self.reason = reason


class KernelError(NarrowsError):
    """A native kernel could not be built or refuses its arguments."""
