"""The interface of scheduling policies: pure functions of the view and the time."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from narrows.core.ids import InstanceId
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.view import ClusterView, Demand


class PrefillPolicy(Protocol):
    """Chooses a prefill instance; None means that none has room now and the request waits.

    It is apart from placing at decode because that becomes possible at another time: prefill may run while no decode
    instance has room (its KV then waits at prefill).
    """

    name: str

    def choose_prefill(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None: ...


class GroupPolicy(Protocol):
    """Places one request after the other in a decode group. A pure function of its arguments; ties are broken by them
    alone, the lowest instance first unless the policy's publication says otherwise."""

    name: str
    # MoE bindings of active requests may move within their KV bindings from step to step, and a request that outgrows
    # its members gets a further one. False: they move only where the next token has no room, and who outgrows is stuck.
    rebalances: bool

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        """Where the request goes, feasible by state.can_allocate; None: nowhere now, it waits. Changes nothing."""
        ...


@runtime_checkable
class AdmitsMany(Protocol):
    """A group policy that can also go through a whole line of waiting requests at once, for speed."""

    def admit(
        self, state: GroupState, waiting: Sequence[Waiting], now_s: float, aging_s: float
    ) -> tuple[tuple[int, Placement], ...]:
        """Exactly what decide.admit makes of `place`, request after request; `state` has the admitted ones counted."""
        ...
