"""Where a request runs."""

from dataclasses import dataclass

from narrows.core.ids import InstanceId


@dataclass(frozen=True, slots=True)
class Placement:
    """The scheduler's whole answer for one request.

    Shard i of the KV lives on kv_binding[i] and holds split[i] tokens; moe_binding is a member of kv_binding
    (NanoCP section 4.1). Degree 1 means local.
    """

    prefill: InstanceId
    moe_binding: InstanceId
    kv_binding: tuple[InstanceId, ...]
    split: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.moe_binding in self.kv_binding
        assert len(self.kv_binding) == len(self.split)

    @property
    def degree(self) -> int:
        return len(self.kv_binding)
