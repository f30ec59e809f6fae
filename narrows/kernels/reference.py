"""The plain torch twin of every kernel: slow, short, obviously right."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels.base import Located, PackedLinear, PagedBatch


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A weight as torch holds it."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class ReferenceKernels:
    """Kernels (see base) in plain torch, for any dtype."""

    name = "reference"

    def relies_on_torch(self, dtype: torch.dtype) -> bool:
        return True

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PlainLinear:
        return PlainLinear(weight, bias)

    def narrow(self, weight: PackedLinear, outputs: int) -> PlainLinear:
        assert isinstance(weight, PlainLinear)
        return PlainLinear(weight.weight[:outputs], None if weight.bias is None else weight.bias[:outputs])

    def linear(self, x: Tensor, weight: PackedLinear, *, residual: Tensor | None = None) -> Tensor:
        assert isinstance(weight, PlainLinear)
        y = F.linear(x, weight.weight, weight.bias)
        return y if residual is None else residual.add_(y)

    def gated_linear(self, x: Tensor, gate_up: PackedLinear) -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight

    def rope_store(
        self,
        qkv: Tensor,
        entries: Tensor,
        batch: PagedBatch,
        cos: Tensor,
        sin: Tensor,
        *,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_kv_heads, head_dim = entries.shape[1], entries.shape[2] // 2
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None:
            query = self.rms_norm(query, q_norm, eps)
        if k_norm is not None:
            key = self.rms_norm(key, k_norm, eps)
        positions = batch.positions.long()
        angles = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        if num_kv_heads:
            entries[batch.slots.long()] = torch.cat([rotate(key, *angles), value], dim=-1)
        return rotate(query, *angles)

    def attend(
        self, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        head_dim = query.shape[2]
        group = query.shape[1] // entries.shape[1]
        out, lse = torch.zeros_like(query), torch.empty(query.shape[:2], dtype=torch.float32)
        for r, (length, pages) in enumerate(zip(batch.context_len.tolist(), batch.page_table.long(), strict=True)):
            rows = slice(int(batch.query_start[r]), int(batch.query_start[r + 1]))
            at = torch.arange(length)
            kv = entries[pages[at // batch.page_size] * batch.page_size + at % batch.page_size].float()
            key, value = kv.repeat_interleave(group, dim=1).chunk(2, dim=-1)
            assert key.shape[-1] == head_dim
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key) * scale
            ahead = at[None, :] - batch.positions[rows].long()[:, None]  # key position minus query position
            hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            scores.masked_fill_(hidden, float("-inf"))
            total = scores.logsumexp(-1)  # [Hq, rows]
            weights = torch.exp(scores - torch.where(total.isinf(), 0.0, total)[..., None])
            out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
            lse[rows] = total.T
        return out, lse

    def top_k(self, scores: Tensor, num: Tensor) -> Tensor:
        most = int(num.max()) if len(num) else 0
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
        chosen = torch.arange(most) < num[:, None]
        positions = order.masked_fill(~chosen, scores.shape[1]).sort(dim=1).values
        return positions.masked_fill(positions == scores.shape[1], -1).to(torch.int32)

    def attend_index(
        self, query: Tensor, memory: Tensor, ids: Tensor, counts: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        requests, num_heads, head_dim = query.shape
        group = requests * num_heads // len(ids)
        valid = torch.arange(ids.shape[1]) < counts[:, None]  # [rows, k]
        key, value = memory[ids.long().clamp(min=0)].float().chunk(2, dim=-1)
        scores = torch.einsum("rgd,rkd->rgk", query.view(-1, group, head_dim).float(), key) * scale
        scores.masked_fill_(~valid[:, None], float("-inf"))
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(total.isinf(), 0.0, total)[..., None])
        value = value.masked_fill(~valid[..., None], 0.0)
        out = torch.einsum("rgk,rkd->rgd", weights, value).to(query.dtype)
        return out.reshape(query.shape), total.reshape(requests, num_heads)

    def locate(self, positions: Tensor, counts: Tensor, batch: PagedBatch, states: Tensor | None = None) -> Located:
        requests, (rows, k) = len(batch.context_len), positions.shape
        heads = rows // max(requests, 1)
        column = torch.arange(k)
        at = positions.masked_fill(column >= counts[:, None], 0).view(requests, heads * k)
        pages = batch.page_table.gather(1, (at // batch.page_size).long())
        slots = (pages * batch.page_size + at % batch.page_size).view(requests, heads, k)
        ids = (slots * heads + torch.arange(heads, dtype=torch.int32)[:, None]).view(rows, k)
        mask = torch.ones(rows, k, dtype=torch.int8) if states is None else states[ids.long()]
        mask[column >= counts[:, None] - 1] = 1  # padding, and the newest entry
        if bool((mask == 0).any()):
            raise KernelError("a selected KV entry is neither here nor at prefill")
        remote = mask == 2
        order = remote.sort(dim=1, descending=True, stable=True).indices  # remote first, each lane in order
        num_remote = remote.sum(dim=1, dtype=torch.int32)
        return Located(ids, num_remote, ids.gather(1, order), positions.gather(1, order), bool(remote.any()))

    def keep(self, memory: Tensor, states: Tensor, ids: Tensor, counts: Tensor, rows: Tensor) -> None:
        for r, count in enumerate(counts.tolist()):
            memory[ids[r, :count].long()] = rows[r, :count]
            states[ids[r, :count].long()] = 1

    def pack_entries(self, memory: Tensor, ids: Tensor, out: Tensor) -> int:
        at = 0
        for entry in memory[ids.long()].view(torch.int16).numpy().view(np.uint16):
            data = _pack(entry)
            out[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            at += len(data)
        return at

    def keep_packed(self, memory: Tensor, states: Tensor, ids: Tensor, counts: Tensor, packed: Tensor) -> int | None:
        for row, count in enumerate(counts.tolist()):
            data = packed[row].numpy().tobytes()
            for id in ids[row, :count].tolist():
                size, values = _unpack(data, memory.shape[1])
                if size > len(data):
                    return row
                memory[id] = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
                states[id] = 1
                data = data[size:]
        return None


_FAR = 15  # an exponent so far below the largest is listed


def _pack(entry: "npt.NDArray[np.uint16]") -> bytes:
    """See csrc/pack.c."""
    exponents = (entry >> 7 & 255).astype(np.uint8)
    largest = int(exponents.max())
    below = np.minimum(largest - exponents, _FAR).astype(np.uint8)
    far = exponents[below == _FAR]
    if not largest or len(far) >= len(entry) // 2:
        return bytes(1) + entry.tobytes()
    low, high = np.split(below, 2)
    rest = (entry >> 8 & 128 | entry & 127).astype(np.uint8)
    return b"".join((bytes([largest]), (low | high << 4).tobytes(), rest.tobytes(), far.tobytes()))


def _unpack(data: bytes, num_values: int) -> tuple[int, "npt.NDArray[np.uint16]"]:
    """The size of the first packed entry, which may be beyond the data, and its values if it is not."""
    half, size = num_values // 2, 1 + num_values // 2 + num_values
    if len(data) < size or not data[0]:
        size = 1 + 2 * num_values
        return size, np.frombuffer(data[1:size].ljust(2 * num_values), np.uint16).copy()
    pairs = np.frombuffer(data, np.uint8, half, 1)
    below = np.concatenate([pairs & 15, pairs >> 4])
    rest = np.frombuffer(data, np.uint8, num_values, 1 + half).astype(np.uint16)
    far = np.flatnonzero(below == _FAR)
    exponents = data[0] - below.astype(np.int64) & 255
    exponents[far] = np.frombuffer(data[size : size + len(far)].ljust(len(far)), np.uint8)
    values = (rest & 128) << 8 | exponents.astype(np.uint16) << 7 | rest & 127
    return size + len(far), values.astype(np.uint16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of the last dim by the given angles, in float32."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
