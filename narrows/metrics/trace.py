"""Timelines as files for chrome://tracing and Perfetto, and what they say of overlap."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from narrows.core.ids import InstanceId
from narrows.core.trace import Span


def write_chrome_trace(path: Path, spans: Mapping[InstanceId, list[Span]]) -> None:
    """One process per instance, one row per lane (more where spans of a lane overlap); times in microseconds."""
    events: list[dict[str, object]] = []
    for pid, (instance, its_spans) in enumerate(sorted(spans.items()), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": instance}})
        rows: dict[str, list[float]] = {}  # lane: end of the last span of each of its rows
        numbers: dict[tuple[str, int], int] = {}
        for span in sorted(its_spans, key=lambda span: (span.lane, span.start_s)):
            ends = rows.setdefault(span.lane, [])
            row = next((i for i, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
            ends[row : row + 1] = [span.end_s]
            if (span.lane, row) not in numbers:
                tid = numbers[span.lane, row] = len(numbers) + 1
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": span.lane}})
            events.append(
                {
                    "name": span.name,
                    "cat": span.lane,
                    "ph": "X",
                    "pid": pid,
                    "tid": numbers[span.lane, row],
                    "ts": round(span.start_s * 1e6, 1),
                    "dur": round((span.end_s - span.start_s) * 1e6, 1),
                    "args": {"layer": span.layer, "bytes": span.num_bytes},
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def busy_s(spans: Iterable[Span], start_s: float = float("-inf"), end_s: float = float("inf")) -> float:
    """Seconds between start_s and end_s during which at least one of the spans was going on."""
    total, until = 0.0, start_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin, end = max(span.start_s, until), min(span.end_s, end_s)
        if end > begin:
            total += end - begin
            until = end
    return total
