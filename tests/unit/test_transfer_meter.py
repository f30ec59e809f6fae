"""A link's rate, when arrivals are heard of late and together."""

import pytest

from narrows.transfer.meter import LinkMeter


@pytest.mark.parametrize("pieces", [2, 5])
def test_arrivals_heard_of_together_do_not_make_a_link_fast(pieces: int) -> None:
    """One megabyte a second; whoever listens is away, and then hears of all pieces within microseconds."""
    meter = LinkMeter()
    for i in range(20):
        start_s = float(i)
        for _ in range(pieces):
            meter.sent(50_000, start_s)
        heard_s = start_s + pieces * 0.05
        for n in range(pieces):
            meter.landed(50_000, heard_s + n * 10e-6)
    assert meter.bytes_per_s is not None
    assert meter.bytes_per_s <= 1.01e6


def test_a_short_stretch_is_judged_as_a_whole() -> None:
    meter = LinkMeter()
    meter.sent(100_000, 1.0)
    meter.landed(100_000, 1.001)
    assert meter.bytes_per_s == pytest.approx(1e8)
