"""How each hand-over of a prefill instance is to go: scheme, importance, expected times. No torch, no clock.

What is known is replaced whole, never changed in place (read-copy-update): a hand-over that was planned goes on as
planned, the next one follows the new profile.
"""

from collections.abc import Sequence
from functools import lru_cache

from narrows.core.scheme import Scheme
from narrows.errors import ConfigError
from narrows.kv.blocks import NUM_BLOCKS, blocks_for
from narrows.profile.importance import ImportanceProfile, IntArray
from narrows.profile.orders import order_blocks
from narrows.profile.timing import Timing, Work
from narrows.transfer.parcel import Plan

ORDERS_KEPT = 64  # prompts of equal length share their order


class Planner:
    """`timing` None: nothing is known of Tp, so no more than must be is pushed (equation 2 with Tp = 0)."""

    def __init__(
        self,
        num_layers: int,
        scheme: Scheme,
        profile: ImportanceProfile | None,
        timing: Timing | None,
        *,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self._timing = timing
        self.adopt(scheme, profile)

    def adopt(self, scheme: Scheme, profile: ImportanceProfile | None) -> None:
        """Plan what comes by these. Raises ConfigError, keeping the old, when they do not go together."""
        if scheme.order == "profile" and not scheme.full:
            if profile is None:
                raise ConfigError(
                    f"profile: scheme {scheme.name!r} orders KV blocks by importance and there is no profile; make one "
                    "with: narrows profile importance"
                )
            if profile.num_layers != self._num_layers:
                raise ConfigError(f"profile: it has {profile.num_layers} layers, the model {self._num_layers}")
        self.scheme = scheme
        self.profile = profile
        self._order = lru_cache(ORDERS_KEPT)(self._make_order)

    def plan(self, key: tuple[str, int], num_tokens: int, uncached: int) -> Plan:
        """For a prompt of `num_tokens`, of which `uncached` are still to be computed."""
        prefill_s = 0.0
        if self._timing is not None and uncached:
            prefill_s = self._timing.prefill_s([Work(uncached, num_tokens)])
        # Only a random order differs between prompts of one length.
        seed = sum(key[0].encode()) if self.scheme.order == "random" else 0
        num_blocks = blocks_for(num_tokens, self._num_blocks)
        return Plan(self.scheme, self._order(num_tokens, seed), num_blocks, prefill_s)

    def observe(self, batch: Sequence[tuple[int, int]], seconds: float) -> None:
        """A prefill step with these (uncached, context) prompts took so long."""
        if self._timing is not None:
            self._timing = self._timing.observe([Work(*work) for work in batch], seconds)

    def _make_order(self, num_tokens: int, seed: int) -> IntArray:
        scheme, profile = self.scheme, self.profile
        num_blocks = blocks_for(num_tokens, self._num_blocks)
        if scheme.full:
            return order_blocks("sequential", None, self._num_layers, num_blocks)
        importance = None
        if scheme.order == "profile":
            assert profile is not None
            importance = profile.importance_for(num_tokens, num_blocks)
        return order_blocks(scheme.order, importance, self._num_layers, num_blocks, seed)  # type: ignore[arg-type]
