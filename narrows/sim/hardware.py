"""What a machine can do at best, by the numbers its vendor publishes; what kernels reach of it is calibration's.

Rates of arithmetic are dense (vendors also quote twice that, for half-empty matrices), bytes are decimal as vendors
count them, links are one direction. Sources of the numbers, by the letters in the comments below:

  [H200] NVIDIA H200 data sheet: 989 TFLOP/s BF16 and 1,979 FP8 dense, 141 GB at 4.8 TB/s, NVLink 900 GB/s both ways.
  [H100] NVIDIA H100 data sheet, SXM: the same arithmetic, 80 GB at 3.35 TB/s, NVLink 900 GB/s both ways.
  [A100] NVIDIA A100 data sheet, 80 GB SXM: 312 TFLOP/s BF16, 2,039 GB/s, NVLink 600 GB/s both ways. No FP8.
  [L20]  NVIDIA L20 product brief: 119.5 TFLOP/s BF16, 239 FP8, 48 GB at 864 GB/s, PCIe 4.0 x16.
  [L40S] NVIDIA L40S data sheet: 362 TFLOP/s BF16, 733 FP8 dense, 48 GB at 864 GB/s, PCIe 4.0 x16.
  [V100S] NVIDIA V100S data sheet: 130 TFLOP/s FP16 with tensor cores, 32 GB at 1,134 GB/s, PCIe 3.0 x16. Neither BF16
          nor FP8: models in BF16 are run in FP16 there.
  [PCIe] one direction of x16: 4.0 31.5 GB/s, 3.0 15.75 GB/s (PCI-SIG, after 128b/130b encoding).
  [N]    NanoCP, section 6.1: eight H200 a node, NVLink 900 GB/s both ways, eight 50 GB/s NICs, one a GPU.
  [S]    SmartGen, table 1 (network) and section 5.1 (PCIe 4.0 x16 inside an instance); section 5.3: V100S machines with
         a 25 Gbps network.

Latencies are assumptions of ours, not published by vendors: a write and its flag 2 us over NVLink, 10 us over PCIe,
5 us over RDMA and 30 us over the virtual RDMA interfaces of cloud instances. Kernels' own are in calibration.
"""

from dataclasses import dataclass, replace

from narrows.errors import ConfigError
from narrows.sim import names

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}

NVLINK_S, PCIE_S, RDMA_S, VIRTUAL_RDMA_S = 2e-6, 10e-6, 5e-6, 30e-6
PCIE3, PCIE4 = 15.75e9, 31.5e9
GBPS = 1e9 / 8  # bytes a second of one Gbit/s


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its ways to others. Fabric: within its node. Link: to other nodes, its own share of it."""

    name: str
    bf16_flops: float  # FLOP/s, dense; FP16 where there is no BF16
    fp8_flops: float  # FLOP/s, dense; that of BF16 where there is no FP8
    memory_bytes: int
    memory_bytes_per_s: float
    fabric_bytes_per_s: float  # one direction
    fabric_latency_s: float
    link_bytes_per_s: float  # one direction
    link_latency_s: float
    per_node: int = 1  # accelerators that share a fabric
    kind: str = ""  # what calibration knows it by, where the name is that of a whole instance

    def __post_init__(self) -> None:
        for field in (
            *("bf16_flops", "fp8_flops", "memory_bytes", "memory_bytes_per_s", "fabric_bytes_per_s"),
            *("link_bytes_per_s", "per_node"),
        ):
            if not getattr(self, field) > 0:
                raise ConfigError(f"hardware.{field}: {getattr(self, field)} is not allowed; use a number above 0")
        for field in ("fabric_latency_s", "link_latency_s"):
            if not getattr(self, field) >= 0:
                raise ConfigError(
                    f"hardware.{field}: {getattr(self, field)} is not allowed; use a number of at least 0"
                )

    @property
    def device(self) -> str:
        """The accelerator's own name."""
        return self.kind or self.name

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of products in this type."""
        return self.fp8_flops if DTYPE_BYTES[dtype] == 1 else self.bf16_flops

    def linked(self, gbps: float) -> "Hardware":
        """The same with another link to other nodes."""
        return replace(self, link_bytes_per_s=gbps * GBPS)


H200 = Hardware(  # [H200] [N]
    "H200", 989e12, 1979e12, 141_000_000_000, 4.8e12, 450e9, NVLINK_S, 50e9, RDMA_S, per_node=8
)
H100 = Hardware(  # [H100], with the NICs of [N]
    "H100", 989e12, 1979e12, 80_000_000_000, 3.35e12, 450e9, NVLINK_S, 50e9, RDMA_S, per_node=8
)
A100 = Hardware(  # [A100], with 200 Gbps NICs as in NVIDIA's DGX A100
    "A100", 312e12, 312e12, 80_000_000_000, 2.039e12, 300e9, NVLINK_S, 25e9, RDMA_S, per_node=8
)
L20 = Hardware(  # [L20] [PCIe], the 25 Gbps of [S]
    "L20", 119.5e12, 239e12, 48_000_000_000, 864e9, PCIE4, PCIE_S, 25 * GBPS, VIRTUAL_RDMA_S
)
L40S = Hardware(  # [L40S] [PCIe], 25 Gbps of the 10-35 that SmartGen's introduction names for such instances
    "L40S", 362e12, 733e12, 48_000_000_000, 864e9, PCIE4, PCIE_S, 25 * GBPS, VIRTUAL_RDMA_S
)
V100S = Hardware(  # [V100S] [PCIe], the 25 Gbps physical network of [S]
    "V100S", 130e12, 130e12, 32_000_000_000, 1.134e12, PCIE3, PCIE_S, 25 * GBPS, RDMA_S
)

# SmartGen's table 1. The network is the whole instance's; of two GPUs each gets half of it when both send.
GN8IS_2X_8XLARGE = replace(L20, kind="L20", name="ecs.gn8is-2x.8xlarge", link_bytes_per_s=32 * GBPS / 2, per_node=2)
GN8IS_4XLARGE = replace(L20, kind="L20", name="ecs.gn8is.4xlarge", link_bytes_per_s=25 * GBPS)
GN8IS_2XLARGE = replace(L20, kind="L20", name="ecs.gn8is.2xlarge", link_bytes_per_s=15 * GBPS)

HARDWARE = {
    hardware.name: hardware
    for hardware in (H200, H100, A100, L20, L40S, V100S, GN8IS_2X_8XLARGE, GN8IS_4XLARGE, GN8IS_2XLARGE)
}


def hardware_named(name: str) -> Hardware:
    """A built-in machine. Raises ConfigError naming the nearest known one."""
    return names.find(HARDWARE, name, "hardware")
