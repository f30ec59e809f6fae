"""A step narrowed to some of its rows."""

import torch
from torch import Tensor

from narrows.kernels.base import PagedBatch


def keep_rows(batch: PagedBatch, rows: Tensor) -> PagedBatch:
    """The batch in which each of the given rows [n] is a request of one row.

    A row sees the positions up to its own, so it is the last token of a request cut off after it: the result is
    exact, not an approximation. Pages are shared with the rows' own requests.
    """
    request = torch.searchsorted(batch.query_start[1:], rows.to(torch.int32), right=True)
    positions = batch.positions[rows]
    context_len = positions + 1
    return PagedBatch(
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        context_len=context_len,
        page_table=batch.page_table[request],
        slots=batch.slots[rows],
        positions=positions,
        page_size=batch.page_size,
        max_query=1,
        max_context=int(context_len.max()),
    )
