"""Steps of a model over a pool that belongs to nobody else: prompts lie one after another, pages in order."""

from collections.abc import Sequence

import torch

from narrows.kernels.base import PagedBatch
from narrows.kv.layout import pages_for


def prefill_step(requests: Sequence[tuple[int, int]], page_size: int) -> PagedBatch:
    """A step of requests (start, stop): each computes its positions start to stop - 1 behind those before them."""
    first_page, tables, slots, positions = 0, [], [], []
    most = max(pages_for(stop, page_size) for _, stop in requests)
    for start, stop in requests:
        pages = pages_for(stop, page_size)
        tables.append([*range(first_page, first_page + pages), *[0] * (most - pages)])
        at = torch.arange(start, stop, dtype=torch.int32)
        positions.append(at)
        slots.append(at + first_page * page_size)
        first_page += pages
    new = [stop - start for start, stop in requests]
    return PagedBatch(
        query_start=torch.tensor([0, *new]).cumsum(0).to(torch.int32),
        context_len=torch.tensor([stop for _, stop in requests], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.cat(slots),
        positions=torch.cat(positions),
        page_size=page_size,
        max_query=max(new),
        max_context=max(stop for _, stop in requests),
        is_decode=False,
    )


def decode_rows(start: int, stop: int, page_size: int) -> PagedBatch:
    """The positions start to stop - 1 of one request, each as a request of its own that ends there and shares its
    pages: the decode steps of known tokens, all at once. A row sees what its step would see."""
    positions = torch.arange(start, stop, dtype=torch.int32)
    pages = torch.arange(pages_for(stop, page_size), dtype=torch.int32)
    return PagedBatch(
        query_start=torch.arange(stop - start + 1, dtype=torch.int32),
        context_len=positions + 1,
        page_table=pages.repeat(stop - start, 1),
        slots=positions.clone(),
        positions=positions,
        page_size=page_size,
        max_query=1,
        max_context=stop,
    )
