"""The interface of scheduling policies: pure functions of the view and the time."""

from typing import Protocol

from narrows.core.ids import InstanceId
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.view import ClusterView, Demand


class Policy(Protocol):
    """Chooses instances; None means that none has room now and the request waits.

    Choosing is in two halves because they become possible at different times: prefill may run while no decode
    instance has room (its KV then waits at prefill).
    """

    name: str

    def choose_prefill(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None: ...

    def choose_decode(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None: ...


class GroupPolicy(Protocol):
    """Places one request after the other in a decode group. A pure function of its arguments; ties are broken by them
    alone, the lowest instance first unless the policy's publication says otherwise."""

    name: str
    rebalances: bool  # MoE bindings of active requests may move within their KV bindings from step to step

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        """Where the request goes, feasible by state.can_allocate; None: nowhere now, it waits. Changes nothing."""
        ...
