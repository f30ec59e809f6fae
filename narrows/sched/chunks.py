"""How a prefill step's token budget is shared among prompts."""

from collections.abc import Sequence


def plan_chunks(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens to compute now of each prompt, given how many each still needs (oldest first, all at least 1).

    The oldest prompt gets at least half of the budget, so it never starves; the rest goes to the others, the one with
    the least left first, so a short prompt does not wait for a long one. What they leave goes to the oldest again.
    """
    if not remaining:
        return []
    chunks = [0] * len(remaining)
    chunks[0] = min(remaining[0], -(-budget // 2))
    left = budget - chunks[0]
    for i in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        chunks[i] = min(remaining[i], left)
        left -= chunks[i]
    chunks[0] += min(remaining[0] - chunks[0], left)
    return chunks
