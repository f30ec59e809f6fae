"""A transport that moves nothing but says that it did: for the simulator and for measuring all that is not transfer."""

from narrows.transfer.loopback import LoopbackTransport


class NullTransport(LoopbackTransport):
    """A loopback transport whose writes do not happen. They are checked, counted and reported all the same."""

    kind = "null"

    def _store(self, region: memoryview, offset: int, data: bytes | bytearray | memoryview) -> None:
        pass
