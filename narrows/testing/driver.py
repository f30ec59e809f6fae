"""The smallest thing that runs a model: pages of its own, one step at a time, several requests at once.

What the runtime does with allocator and scheduler, here in a screenful, for tests of models, kernels and backends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from narrows.attention.base import AttentionBackend, PagedAttention
from narrows.kernels.base import Kernels, PagedBatch
from narrows.models.layers.decoder import Model


def make_batch(
    pages: Sequence[Sequence[int]], context_len: Sequence[int], num_new: Sequence[int], page_size: int
) -> PagedBatch:
    """A step of the last num_new[r] of context_len[r] tokens of each request r, whose KV is in pages[r] in order."""
    most = max(map(len, pages))
    table = torch.tensor([[*row, *[0] * (most - len(row))] for row in pages], dtype=torch.int32)
    request = torch.repeat_interleave(torch.arange(len(pages)), torch.tensor(num_new))
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(context_len, num_new, strict=True)])
    slots = table[request, positions // page_size] * page_size + positions % page_size
    return PagedBatch(
        query_start=torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        context_len=torch.tensor(context_len, dtype=torch.int32),
        page_table=table,
        slots=slots.to(torch.int32),
        positions=positions.to(torch.int32),
        page_size=page_size,
        max_query=max(num_new),
        max_context=max(context_len),
    )


class Driver:
    """A model with a pool. Requests are numbered from 0; their pages are dealt in a shuffled order."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        *,
        num_requests: int = 1,
        max_tokens: int = 512,  # of one request
        page_size: int = 16,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self._attention = attention or PagedAttention(kernels)
        per_request = -(-max_tokens // page_size)
        num_pages = num_requests * per_request
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
        self._pages: list[list[int]] = order.view(num_requests, per_request).tolist()
        self._length = [0] * num_requests
        shape = (num_pages * page_size, model.spec.num_kv_heads, model.spec.entry_dim)
        # Not zeros: a row that reads what was never stored must show.
        self.entries = [torch.full(shape, 1e4, dtype=model.dtype) for _ in range(model.spec.num_layers)]

    def step(self, tokens: dict[int, Sequence[int]], *, all_rows: bool = True) -> Tensor:
        """Append tokens to requests and run them together. Returns float32 logits, requests in the order given:
        of every row [T, V], or of each request's last row [R, V]."""
        for request, new in tokens.items():
            self._length[request] += len(new)
        counts = [len(new) for new in tokens.values()]
        batch = make_batch(
            [self._pages[r][: -(-self._length[r] // self.page_size)] for r in tokens],
            [self._length[r] for r in tokens],
            counts,
            self.page_size,
        )
        token_ids = torch.tensor([token for new in tokens.values() for token in new], dtype=torch.int32)
        rows = None if all_rows or batch.max_query == 1 else batch.query_start[1:] - 1
        return self.model.forward(token_ids, self.entries, batch, self._attention, logit_rows=rows)

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, chunk: int | None = None) -> list[int]:
        """Continue a prompt in request 0 by the most likely tokens, `chunk` prompt tokens a step (None: all)."""
        size = chunk or len(prompt)
        for start in range(0, len(prompt), size):
            logits = self.step({0: prompt[start : start + size]}, all_rows=False)
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step({0: output[-1:]})[-1].argmax()))
        return output
