"""The fast kernels: C compiled on first use (csrc/), called with the tensors' addresses.

Threads are the kernels' own (csrc/threads.h says why) and wait politely, so two processes can share cores. Results of a
row do not depend on the other rows of a call nor on the number of threads.
"""

import ctypes
import weakref
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels.base import Located, PackedLinear, PagedBatch
from narrows.kernels.build import build, load_library
from narrows.kernels.reference import PlainLinear, ReferenceKernels

PANEL = 32  # outputs of a packed panel, as in csrc/linear.c
MAX_HEAD_DIM = 256  # as in csrc/attend.c
NARROW_ROWS = 4  # in a decode step a request of at most so many rows is cut along its tokens, not along its rows
AMX_ROWS = 64  # from here on torch's tile-based product is faster than ours, where the processor has tiles


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """A bfloat16 weight in panels [N / 32, K / 2, 32, 2], zeros past N and K."""

    in_features: int
    out_features: int
    panels: Tensor
    bias: Tensor | None  # float32
    plain: PlainLinear | None  # also kept as it was, for large products on a processor with AMX
    weight_ptr: int
    bias_ptr: int


class NativeKernels:
    """Kernels (see base) in C. bfloat16 throughout; in float32 the products are torch's own.

    Arguments of a wrong dtype, shape or layout raise KernelError; what slots, page tables and lengths say is trusted.
    """

    name = "native"

    def __init__(self, num_threads: int | None = None, library: ctypes.CDLL | None = None) -> None:
        """num_threads is torch's own number unless given. Calls from several threads at once wait for each other."""
        self.library = library = library or load_library(build())
        self.num_threads = num_threads or torch.get_num_threads()
        self.crew = new_crew(library, self.num_threads)
        weakref.finalize(self, declare(library, "narrows_crew_free", "p"), self.crew)
        self._linear = declare(library, "narrows_linear", "p" * 4 + "lll" + "ii" + "p")
        self._silu_mul = declare(library, "narrows_silu_mul", "ppll")
        self._rms_norm = declare(library, "narrows_rms_norm", "i" + "ppp" + "llf" + "p")
        self._rope_store = declare(library, "narrows_rope_store", "i" + "p" * 9 + "llllf" + "p")
        self._attend = declare(library, "narrows_attend", "i" + "p" * 7 + "l" * 6 + "fll" + "p")
        self._top_k = declare(library, "narrows_top_k", "ppplllp")
        self._attend_index = declare(library, "narrows_attend_index", "i" + "p" * 6 + "llllf" + "p")
        self._locate = declare(library, "narrows_locate", "p" * 8 + "l" * 5)
        self._keep = declare(library, "narrows_keep", "p" * 5 + "llll")
        self._pack = declare(library, "narrows_pack", "ppp" + "ll")
        self._keep_packed = declare(library, "narrows_keep_packed", "p" * 5 + "llll")
        self._pack.restype = self._keep_packed.restype = ctypes.c_long
        self._plain = ReferenceKernels()
        self._has_tiles = torch.cpu._is_amx_tile_supported()

    def relies_on_torch(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or self._has_tiles

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        if weight.dtype != torch.bfloat16:
            return self._plain.pack(weight, bias)
        outputs, inputs = weight.shape
        padded = F.pad(weight, (0, inputs % 2, 0, -outputs % PANEL)).contiguous()
        steps = padded.view(torch.int32)
        panels = steps.view(-1, PANEL, steps.shape[1]).transpose(1, 2).contiguous()
        exact_bias = None if bias is None else bias.float().contiguous()
        return PanelLinear(
            inputs,
            outputs,
            panels,
            exact_bias,
            PlainLinear(weight, bias) if self._has_tiles else None,
            panels.data_ptr(),
            0 if exact_bias is None else exact_bias.data_ptr(),
        )

    def narrow(self, weight: PackedLinear, outputs: int) -> PackedLinear:
        if isinstance(weight, PlainLinear):
            return self._plain.narrow(weight, outputs)
        assert isinstance(weight, PanelLinear)
        plain = None if weight.plain is None else self._plain.narrow(weight.plain, outputs)
        return replace(weight, out_features=outputs, plain=plain)  # panels behind the last are not read

    def linear(self, x: Tensor, weight: PackedLinear, *, residual: Tensor | None = None) -> Tensor:
        if isinstance(weight, PlainLinear):
            return self._plain.linear(x, weight, residual=residual)
        assert isinstance(weight, PanelLinear)
        rows = check_rows(x, weight)
        if weight.plain is not None and rows >= AMX_ROWS:
            return self._plain.linear(x, weight.plain, residual=residual)
        if residual is None:
            y = x.new_empty(rows, weight.out_features)
        else:
            y = residual
            if y.dtype != x.dtype or y.shape != (rows, weight.out_features) or not y.is_contiguous():
                raise KernelError(f"residual: want {[rows, weight.out_features]} like x, got {describe(y)}")
        if weight.in_features % 2:
            x = F.pad(x, (0, 1))
        self._linear(
            y.data_ptr(),
            x.data_ptr(),
            weight.weight_ptr,
            weight.bias_ptr,
            rows,
            (weight.in_features + 1) // 2,
            weight.out_features,
            residual is not None,
            0,
            self.crew,
        )
        return y

    def gated_linear(self, x: Tensor, gate_up: PackedLinear) -> Tensor:
        if isinstance(gate_up, PlainLinear):
            return self._plain.gated_linear(x, gate_up)
        assert isinstance(gate_up, PanelLinear)
        rows, width = check_rows(x, gate_up), gate_up.out_features // 2
        if gate_up.plain is not None and rows >= AMX_ROWS:
            return self._plain.gated_linear(x, gate_up.plain)
        y = x.new_empty(rows, width)
        if width % PANEL:
            both = self.linear(x, gate_up)
            self._silu_mul(y.data_ptr(), both.data_ptr(), rows, width)
            return y
        if gate_up.in_features % 2:
            x = F.pad(x, (0, 1))
        self._linear(
            y.data_ptr(),
            x.data_ptr(),
            gate_up.weight_ptr,
            gate_up.bias_ptr,
            rows,
            (gate_up.in_features + 1) // 2,
            width,
            0,
            1,
            self.crew,
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        check_like("x", x, x)
        check_like("weight", weight, x, (width,))
        y = torch.empty_like(x)
        rows = x.numel() // width if width else 0
        self._rms_norm(is_bf16(x), y.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, eps, self.crew)
        return y

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
        rows, (_, num_kv_heads, entry_dim) = qkv.shape[0], entries.shape
        head_dim = entry_dim // 2
        check_head_dim(head_dim)
        check_like("qkv", qkv, qkv, (rows, (num_heads + 2 * num_kv_heads) * head_dim))
        check_like("entries", entries, qkv)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                check_like(name, norm, qkv, (head_dim,))
        for name, table in (("cos", cos), ("sin", sin)):
            if table.dtype is not torch.float32 or table.shape[-1] != head_dim // 2 or not table.is_contiguous():
                raise KernelError(
                    f"{name}: want contiguous float32 [positions, {head_dim // 2}], got {describe(table)}"
                )
        query = qkv.new_empty(rows, num_heads, head_dim)
        self._rope_store(
            is_bf16(qkv),
            query.data_ptr(),
            entries.data_ptr(),
            qkv.data_ptr(),
            indices("batch.positions", batch.positions, rows),
            indices("batch.slots", batch.slots, rows),
            cos.data_ptr(),
            sin.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            eps,
            self.crew,
        )
        return query

    def attend(
        self, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        (rows, num_heads, head_dim), num_kv_heads = query.shape, entries.shape[1]
        check_head_dim(head_dim)
        check_like("query", query, query)
        check_like("entries", entries, query, (entries.shape[0], num_kv_heads, 2 * head_dim))
        if num_heads % num_kv_heads:
            raise KernelError(f"query: {num_heads} heads are no multiple of the {num_kv_heads} KV heads of entries")
        if not scale > 0.0 or (window is not None and window < 1):
            raise KernelError(f"scale and window must be above 0, got {scale} and {window}")
        requests = batch.context_len.shape[0]
        out, lse = torch.empty_like(query), query.new_empty(rows, num_heads, dtype=torch.float32)
        status = self._attend(
            is_bf16(query),
            out.data_ptr(),
            lse.data_ptr(),
            query.data_ptr(),
            entries.data_ptr(),
            indices("batch.query_start", batch.query_start, requests + 1),
            indices("batch.context_len", batch.context_len, requests),
            indices("batch.page_table", batch.page_table, batch.page_table.numel()),
            requests,
            batch.page_table.shape[1],
            batch.page_size,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            window or 0,
            NARROW_ROWS if batch.is_decode else 0,
            self.crew,
        )
        if status:
            raise KernelError(f"attend: no memory for the scratch of a context of {batch.max_context} tokens")
        return out, lse

    def top_k(self, scores: Tensor, num: Tensor) -> Tensor:
        rows, n = scores.shape
        if scores.dtype is not torch.float32 or not scores.is_contiguous():
            raise KernelError(f"scores: want contiguous float32 [rows, n], got {describe(scores)}")
        num_at, wanted = indices("num", num, rows), num.tolist()
        most = max(wanted, default=0)
        if most > n or min(wanted, default=0) < 0:
            raise KernelError(f"num: want 0 to {n}, the number of scores of a row, got {wanted}")
        positions = num.new_empty(rows, most)
        status = self._top_k(positions.data_ptr(), scores.data_ptr(), num_at, rows, n, most, self.crew)
        if status:
            raise KernelError(
                f"top_k: no memory for the scratch of {n} scores" if status == -1 else "scores: NaN has no order"
            )
        return positions

    def attend_index(
        self, query: Tensor, memory: Tensor, ids: Tensor, counts: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        (requests, num_heads, head_dim), (rows, width) = query.shape, ids.shape
        check_head_dim(head_dim)
        check_like("query", query, query)
        check_like("memory", memory, query, (memory.shape[0], 2 * head_dim))
        num_kv_heads = rows // requests if requests else 1
        if rows != requests * num_kv_heads or num_heads % max(num_kv_heads, 1):
            raise KernelError(f"ids: {rows} rows are no KV heads of {requests} requests with {num_heads} query heads")
        if not scale > 0.0:
            raise KernelError(f"scale must be above 0, got {scale}")
        out, lse = torch.empty_like(query), torch.empty(requests, num_heads, dtype=torch.float32)
        status = self._attend_index(
            is_bf16(query),
            out.data_ptr(),
            lse.data_ptr(),
            query.data_ptr(),
            memory.data_ptr(),
            indices("ids", ids, rows * width),
            indices("counts", counts, rows),
            rows,
            width,
            num_heads // num_kv_heads,
            head_dim,
            scale,
            self.crew,
        )
        if status:
            raise KernelError(f"attend_index: no memory for the scratch of {rows} rows of up to {width} entries")
        return out, lse

    def locate(self, positions: Tensor, counts: Tensor, batch: PagedBatch, states: Tensor | None = None) -> Located:
        (rows, width), requests = positions.shape, batch.context_len.shape[0]
        if rows % max(requests, 1):
            raise KernelError(f"positions: {rows} rows are no KV heads of {requests} requests")
        if states is not None:
            check_states(states)
        ids, num_remote = torch.empty_like(positions), torch.empty_like(counts)
        remote_ids, remote_positions = torch.empty_like(positions), torch.empty_like(positions)
        num = self._locate(
            ids.data_ptr(),
            remote_ids.data_ptr(),
            remote_positions.data_ptr(),
            num_remote.data_ptr(),
            indices("positions", positions, rows * width),
            indices("counts", counts, rows),
            indices("batch.page_table", batch.page_table, batch.page_table.numel()),
            0 if states is None else states.data_ptr(),
            rows,
            width,
            rows // max(requests, 1),
            batch.page_table.shape[1],
            batch.page_size,
        )
        if num < 0:
            raise KernelError("a selected KV entry is neither here nor at prefill")
        return Located(ids, num_remote, remote_ids, remote_positions, num > 0)

    def keep(self, memory: Tensor, states: Tensor, ids: Tensor, counts: Tensor, rows: Tensor) -> None:
        (num_rows, width), (_, entry_dim) = ids.shape, memory.shape
        check_like("memory", memory, memory)
        check_like("rows", rows, memory, (num_rows, rows.shape[1], entry_dim))
        check_states(states)
        self._keep(
            memory.data_ptr(),
            states.data_ptr(),
            rows.data_ptr(),
            indices("ids", ids, num_rows * width),
            indices("counts", counts, num_rows),
            num_rows,
            width,
            rows.shape[1],
            entry_dim * memory.element_size(),
        )

    def pack_entries(self, memory: Tensor, ids: Tensor, out: Tensor) -> int:
        check_packable(memory)
        count, width = len(ids), memory.shape[1]
        if out.dtype is not torch.uint8 or not out.is_contiguous() or out.numel() < count * (2 * width + 1):
            raise KernelError(f"out: want {count * (2 * width + 1)} contiguous uint8, got {describe(out)}")
        return int(self._pack(out.data_ptr(), memory.data_ptr(), indices("ids", ids, count), count, width))

    def keep_packed(self, memory: Tensor, states: Tensor, ids: Tensor, counts: Tensor, packed: Tensor) -> int | None:
        check_packable(memory)
        check_states(states)
        rows, width = ids.shape
        if packed.dtype is not torch.uint8 or not packed.is_contiguous() or packed.dim() != 2 or len(packed) != rows:
            raise KernelError(f"packed: want contiguous uint8 [{rows}, bytes], got {describe(packed)}")
        bad = self._keep_packed(
            memory.data_ptr(),
            states.data_ptr(),
            packed.data_ptr(),
            indices("ids", ids, rows * width),
            indices("counts", counts, rows),
            rows,
            width,
            packed.shape[1],
            memory.shape[1],
        )
        return None if bad < 0 else int(bad)


def new_crew(library: ctypes.CDLL, num_threads: int) -> int:
    """The address of a crew of threads, to be given back to narrows_crew_free."""
    new = declare(library, "narrows_crew_new", "i")
    new.restype = ctypes.c_void_p
    crew = new(num_threads)
    if not crew:
        raise KernelError(f"kernels: no memory for {num_threads} threads")
    return int(crew)


def declare(library: ctypes.CDLL, name: str, signature: str) -> "ctypes._NamedFuncPointer":
    """The C function, a letter per argument (pointer, long, int, float, double). Where none returns, nobody looks."""
    function = library[name]
    types = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float, "d": ctypes.c_double}
    function.argtypes = [types[letter] for letter in signature]  # type: ignore[misc]
    function.restype = ctypes.c_int
    return function


def is_bf16(x: Tensor) -> bool:
    if x.dtype is torch.bfloat16:
        return True
    if x.dtype is torch.float32:
        return False
    raise KernelError(f"dtype: native kernels know bfloat16 and float32, not {x.dtype}; use kernels = reference")


def check_rows(x: Tensor, weight: PanelLinear) -> int:
    """The number of rows of x, which must fit the weight."""
    if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != weight.in_features or not x.is_contiguous():
        raise KernelError(f"x: want contiguous bfloat16 [rows, {weight.in_features}], got {describe(x)}")
    return x.shape[0]


def check_like(name: str, x: Tensor, like: Tensor, shape: tuple[int, ...] | None = None) -> None:
    if x.dtype is not like.dtype or not x.is_contiguous() or (shape is not None and x.shape != shape):
        raise KernelError(f"{name}: want contiguous {like.dtype} {list(shape or x.shape)}, got {describe(x)}")


def check_states(states: Tensor) -> None:
    if states.dtype is not torch.int8 or not states.is_contiguous():
        raise KernelError(f"states: want contiguous int8, got {describe(states)}")


def check_packable(memory: Tensor) -> None:
    width = memory.shape[-1]
    if memory.dtype is not torch.bfloat16 or not memory.is_contiguous() or width % 2 or width > 2 * MAX_HEAD_DIM:
        raise KernelError(f"memory: want contiguous bfloat16 entries of an even size, got {describe(memory)}")


def check_head_dim(head_dim: int) -> None:
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"head size {head_dim}: native kernels know multiples of 16 up to {MAX_HEAD_DIM}")


def indices(name: str, x: Tensor, count: int) -> int:
    """The address of an int32 tensor of so many numbers."""
    if x.dtype is not torch.int32 or x.numel() != count or not x.is_contiguous():
        raise KernelError(f"{name}: want {count} contiguous int32, got {describe(x)}")
    return x.data_ptr()


def describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}{'' if x.is_contiguous() else ', not contiguous'}"
