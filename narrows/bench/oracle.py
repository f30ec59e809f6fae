"""The order `oracle`: what a prompt will select, known in advance. For measurement only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narrows.config import EngineConfig
from narrows.profile.importance import VERSION, Group, ImportanceProfile
from narrows.profiles import Workshop, ensure_calibration

if TYPE_CHECKING:
    from narrows.select.base import Selector


class Oracle:
    """Runs prompts in this process, with the selector and the tokens that decode will choose."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._workshop = Workshop(config, folder)
        self._selector: Selector | None = None

    def profile(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> ImportanceProfile:
        """A group for each prompt, whose lengths differ: how often its own decode steps select each of its tokens."""
        from narrows.profile.measuring.importance import TextRun

        if self._selector is None:
            self._selector = self._workshop.selector(ensure_calibration(self._workshop))
        groups = []
        for prompt, output in zip(prompts, outputs, strict=True):
            run = TextRun(self._workshop.model, self._workshop.kernels, self._selector, len(prompt) + len(output))
            run.prefill(list(prompt))
            counts = run.decode(list(output)[:-1])  # the last token is not read any more
            num_queries = max(1, len(output) - 1) * self._workshop.spec.num_kv_heads
            groups.append(Group.from_counts(counts, num_queries))
        groups.sort(key=lambda group: group.num_tokens)
        return ImportanceProfile(self._workshop.model_id, self._selector.fingerprint, VERSION, tuple(groups))
