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


def test_a_burst_that_says_as_much_of_latency_is_but_a_lower_bound() -> None:
    """69 KB in 30 ms, on a link of 100 MB/s whose ends were busy; then a megabyte and more at the link's rate."""
    meter = LinkMeter()
    meter.sent(69_000, 0.0)
    meter.landed(69_000, 0.030)
    assert meter.bytes_per_s == pytest.approx(2.3e6)
    meter.sent(5_000_000, 1.0)
    meter.landed(5_000_000, 1.05)
    assert meter.bytes_per_s == pytest.approx(1e8), "a bound is no sample to be averaged with"
    meter.sent(69_000, 2.0)
    meter.landed(69_000, 2.030)
    assert meter.bytes_per_s == pytest.approx(1e8), "nothing was learned"
    meter.sent(5_000_000, 3.0)
    meter.landed(5_000_000, 3.1)
    assert meter.bytes_per_s == pytest.approx(1e8 - 0.4 * 5e7)
