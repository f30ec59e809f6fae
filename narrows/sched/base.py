"""The interface of scheduling policies: pure functions of the view and the time."""

from typing import Protocol

from narrows.core.ids import InstanceId
from narrows.sched.view import ClusterView, Demand


class Policy(Protocol):
    """Chooses instances; None means that none has room now and the request waits.

    Choosing is in two halves because they become possible at different times: prefill may run while no decode
    instance has room (its KV then waits at prefill).
    """

    name: str

    def choose_prefill(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None: ...

    def choose_decode(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None: ...
