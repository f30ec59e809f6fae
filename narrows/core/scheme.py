"""How KV is handed over: the settings of one mechanism, from full transfer to all three paths of SmartGen."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheme:
    """One combination of SmartGen's techniques (section 4), each to be switched on its own (section 5.3); `packed` is
    ours.

    The named ones are in SCHEMES. `adaptive` makes a hand-over full where equation 2 says that all of it can cross
    while prefill computes.
    """

    name: str
    full: bool = False  # decode waits for all KV
    adaptive: bool = False
    order: str = "profile"  # in which KV blocks are pushed, layers 0 and 1 before all others
    fraction: float | None = None  # of all KV blocks to push before decode begins; None: equation 2
    parallel_lanes: bool = True  # fetch ahead of attention where the selector knows it, not when attention waits
    speculative: float | None = 0.1  # of all KV blocks, for each decode step; None: from the idle window; 0: off
    packed: bool = True  # what is fetched crosses losslessly packed, in three quarters of its bytes (bfloat16 only)
    num_blocks: int | None = None  # KV blocks of a layer (M), at most; None: 1,024


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("auto", adaptive=True),
        Scheme("full", full=True),
        Scheme("selective"),
        Scheme("sequential", order="sequential"),
        Scheme("random", order="random"),
        Scheme("streaming", order="streaming"),
        Scheme("partial", order="sequential", parallel_lanes=False, speculative=0.0, packed=False),
    )
}
