"""What was decided and from what, as JSON: recorded by an engine or a simulation, replayed by anybody."""

from dataclasses import fields
from typing import Any

import numpy as np

from narrows.sched.group import Bindings, Decision, GroupView, Placement, Waiting


def plain(value: Any) -> Any:
    """Views, decisions and what they are made of as nested lists and dicts."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, GroupView | Bindings | Decision | Placement | Waiting):
        return {spec.name: plain(getattr(value, spec.name)) for spec in fields(value)}
    return value.item() if isinstance(value, np.generic) else value


def view_of(said: dict[str, Any]) -> GroupView:
    """The view that `plain` was given."""
    arrays = {name: _ints(said[name]) for name in ("nodes", "num_pages", "used_pages", "kv_tokens")}
    return GroupView(
        **arrays,
        page_size=said["page_size"],
        max_num_seqs=said["max_num_seqs"],
        active=Bindings(**{name: _ints(values) for name, values in said["active"].items()}),
        waiting=tuple(map(waiting_of, said["waiting"])),
        num_placed=said["num_placed"],
        cross_nodes=said["cross_nodes"],
        arriving=None if said["arriving"] is None else _ints(said["arriving"]),
    )


def waiting_of(said: dict[str, Any]) -> Waiting:
    cached = said["cached"]
    return Waiting(said["num_tokens"], said["since_s"], None if cached is None else tuple(cached))


def _ints(values: list[int]) -> Any:
    return np.array(values, np.int64)
