"""Reading recorded traces: Mooncake's JSON lines and Azure's CSV. An error names file, line and field, and the fix."""

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrows.core.request import MAX_COUNT
from narrows.errors import ConfigError
from narrows.sim.workload import HASH_BLOCK, Arrival, Trace

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTHS = {"TIMESTAMP": "ContextTokens", "timestamp": "input_length"}  # of prompts, by the field of the time


def read_trace(path: Path, limit: int | None = None, most_tokens: int | None = None) -> Trace:
    """A trace in either format, which the first line tells; times count from its first request.

    `limit`: only the first so many requests. `most_tokens`: what the cluster can hold of one request at its end. Raises
    ConfigError naming file, line and field.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: {limit} is not allowed; use at least 1 request, or leave it out for all")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            if not first:
                raise ConfigError(f"{path}:1: the trace is empty; give one request a line (JSON lines or Azure's CSV)")
            file.seek(0)
            # utf-8-sig drops its mark only at the very beginning, to which seek(0) returns.
            rows = _azure(path, file) if _is_csv(first) else _mooncake(path, file)
            return tuple(_checked(path, rows, limit, most_tokens))
    except OSError as error:
        raise ConfigError(
            f"trace: {path} can not be read: {error.strerror or error}; name a file that exists"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: {path} is not text in UTF-8; give JSON lines or Azure's CSV, unpacked") from None


def _is_csv(first: str) -> bool:
    return not first.lstrip().startswith(("{", "[")) and "," in first


Row = tuple[int, str, Arrival]  # line, name of its time's field, the request at its absolute time


def _checked(path: Path, rows: Iterator[Row], limit: int | None, most_tokens: int | None) -> Iterator[Arrival]:
    """From the first one's time on; times may not go back."""
    start = before = None
    count = 0
    for line, field, arrival in rows:
        if start is None or before is None:
            start = before = arrival.time_s
        if arrival.time_s < before:
            raise ConfigError(
                f"{path}:{line}: {field}: earlier than the line before; sort the trace by {field} (earliest first)"
            )
        before = arrival.time_s
        if most_tokens is not None and arrival.num_tokens > most_tokens:
            raise ConfigError(
                f"{path}:{line}: {LENGTHS[field]}: {arrival.num_prompt} tokens and {arrival.num_output} of output are "
                f"more than the cluster can hold of a request ({most_tokens}); add instances, or leave this one out"
            )
        yield Arrival(arrival.time_s - start, arrival.num_prompt, arrival.num_output, arrival.prefix_ids)
        count += 1
        if count == limit:
            return
    if count == 0:
        raise ConfigError(f"{path}:2: the trace has a header but no request; give one request a line")


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path}:{line}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: not JSON ({error}); each line must be one JSON object, unless the file is Azure's CSV"
            ) from None
        if not isinstance(row, dict):
            raise ConfigError(f'{where}: not a JSON object; write {{"timestamp": ..., "input_length": ...}}')
        stamp = _member(where, row, "timestamp", "milliseconds")
        if type(stamp) not in (int, float) or not 0 <= stamp < 1e15:
            raise ConfigError(
                f"{where}: timestamp: {_shown(stamp)} is no time; use milliseconds, a number of at least 0"
            )
        prompt = _tokens(where, "input_length", _member(where, row, "input_length", "tokens"), least=1)
        output = _tokens(where, "output_length", _member(where, row, "output_length", "tokens"), least=1)
        yield line, "timestamp", Arrival(stamp / 1000, prompt, output, _prefix_ids(where, row, prompt))


def _prefix_ids(where: str, row: dict[str, Any], num_prompt: int) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{where}: hash_ids: {_shown(ids)} is no list of ids; use whole numbers of at least 0, or []")
    blocks = -(-num_prompt // HASH_BLOCK)
    if ids and len(ids) != blocks:
        raise ConfigError(
            f"{where}: hash_ids: {len(ids)} ids for {num_prompt} tokens; "
            f"give {blocks} (one for each {HASH_BLOCK} tokens, the last part included), or leave them out"
        )
    return tuple(ids)


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    rows = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(row for row in rows if row)]
        for column in AZURE_COLUMNS:
            if column not in header:
                raise ConfigError(
                    f"{path}:{rows.line_num}: {column}: missing in the header {','.join(header)!r}; "
                    f"the first line must be {','.join(AZURE_COLUMNS)}"
                )
        at = [header.index(column) for column in AZURE_COLUMNS]
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                field = header[min(len(row), len(header) - 1)]
                raise ConfigError(
                    f"{where}: {field}: {len(row)} values for {len(header)} columns; give each column one"
                )
            stamp, prompt, output = (row[column].strip() for column in at)
            yield (
                rows.line_num,
                "TIMESTAMP",
                Arrival(
                    _time(where, stamp),
                    _tokens(where, "ContextTokens", _whole(prompt), least=1),
                    _tokens(where, "GeneratedTokens", _whole(output), least=1),
                ),
            )
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: not CSV ({error}); write {','.join(AZURE_COLUMNS)}") from None


def _time(where: str, text: str) -> float:
    """Seconds of a date and time, in UTC where it does not say."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{where}: TIMESTAMP: {_shown(text)} is no time; write it like 2023-11-16 18:15:46.680"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _member(where: str, row: dict[str, Any], field: str, unit: str) -> Any:
    if field not in row:
        raise ConfigError(f"{where}: {field}: missing; add it ({unit})")
    return row[field]


def _whole(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _tokens(where: str, field: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise ConfigError(f"{where}: {field}: {_shown(value)} is not allowed; use a whole number of at least {least}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
