"""What is to be moved where, as integers."""

from dataclasses import dataclass

from narrows.core.ids import InstanceId


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a peer needs to write into a registered region. `token` is opaque to all but the region's transport."""

    transport: str
    token: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a decode instance has made room for a request.

    `runs` are (first slot, number of slots) in token order; together they hold the first num_tokens tokens of it.
    """

    request: str
    generation: int
    instance: InstanceId
    address: str  # transport address to dial
    pool: RegionKey
    mask: RegionKey
    num_slots: int  # slots in the pool, which fixes the stride between its layers
    runs: tuple[tuple[int, int], ...]
    metadata: RegionKey | None = None  # where the selector's goes; None: there is none

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.runs)
