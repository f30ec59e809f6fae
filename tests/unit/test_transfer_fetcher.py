"""What is given up must not be written over what is asked for next."""

import numpy as np

from narrows.core.wire import Fetch
from narrows.transfer.base import Copy, Message, Post, Priority, Tag, TransportConfig
from narrows.transfer.codec import decode
from narrows.transfer.fetcher import FETCH_TAG, Fetcher, Origin
from narrows.transfer.loopback import LoopbackHub, LoopbackTransport


def test_an_answer_that_comes_after_its_fetch_was_broken_lands_on_nothing_in_use() -> None:
    hub = LoopbackHub()
    prefill, decoding = (LoopbackTransport(TransportConfig(name), hub) for name in ("prefill", "decode"))
    source = prefill.allocate(64)
    source.buffer[:] = b"x" * 64
    peer = decoding.connect(prefill.address)
    fetcher = Fetcher(decoding, 1, lambda: 0.0, lambda _: None, patience_s=1.0)
    fetcher.begin([Origin("r", 0, peer, 16)])
    fetcher.rows(2, 64)
    ticket = fetcher.fetch(2, [(0, [np.array([3])])], 64)
    hub.settle()
    (asked,) = [decode(event.payload) for event in prefill.poll() if isinstance(event, Message)]
    assert isinstance(asked, Fetch)
    assert fetcher.take(Message(peer, b"damaged"))
    assert fetcher.wait(ticket) == ({0}, set())
    later = fetcher.rows(4, 64)  # the same place, had it not been given up
    whole = np.array([0], dtype=np.int64)
    copy = Copy(source, whole, whole, np.array([64], dtype=np.int64))
    tag = Tag(f"{FETCH_TAG}{prefill.name}", ticket, 2)
    prefill.post(prefill.connect(decoding.address), Post(tag, Priority.ON_DEMAND, asked.region, (copy,)))
    hub.settle()
    assert bytes(later) == bytes(64)
    for transport in (prefill, decoding):
        transport.close()
