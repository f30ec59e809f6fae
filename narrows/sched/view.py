"""What a policy may know: immutable, complete, without a clock."""

from dataclasses import dataclass

from narrows.core.ids import InstanceId, Role


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One ready instance. `running` counts the requests bound to it, from placement to their end."""

    id: InstanceId
    role: Role
    num_pages: int
    used_pages: int
    page_size: int
    max_num_seqs: int
    running: int

    @property
    def free_pages(self) -> int:
        return self.num_pages - self.used_pages

    @property
    def free_seqs(self) -> int:
        return self.max_num_seqs - self.running


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All ready instances, in the order of their ids."""

    instances: tuple[InstanceView, ...]

    def of(self, role: Role) -> tuple[InstanceView, ...]:
        return tuple(instance for instance in self.instances if instance.role is role)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a placement is asked for: the tokens whose KV must be held, the next one's included."""

    num_tokens: int
    needs_decode: bool  # False: the token that prefill samples is the last one
