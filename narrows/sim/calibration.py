"""Every number of the roofline and of the synthetic workloads that follows from no data sheet and no model's shape.

Each `Constant` says where it is from. `claims` are published results that were used to choose it: these can not count
as reproduced (`used(claim)`). Constants without claims come from other publications or are assumptions, as `source`
says.

How NanoCP's numbers lead to ours, for DeepSeek-V3 on 4 nodes of 8 H200 (bytes and FLOPs are model_shapes', rates
hardware's; M requests are bound to an instance, on average):

- Attention: FlashMLA's rates give 278,528 FLOP / (2/3 of 989 TFLOP/s) = 0.42 ns for a token and 0.15 us for a sequence.
  Nothing of NanoCP's enters. At 30 requests/s M is 72 (below), and the 40-55 us of figure 5(b)'s light instances mean
  800 to 1,300 tokens a short request. That sets the prompts: 250, beside an output seen at a random step of it (700).
- Dispatch + combine of M tokens take 95 us + 2.61 us M by DeepEP's table. The 350.9 us of NanoCP's figure 15 is
  therefore M = 98, and uniform CP8 then routes 98 x 7 queries of 147 KB and results of 132 KB: 629.8 us less two
  latencies is 333 GB/s of NVLink's 450. Per-request CP moves little, so its 60.4 us is two latencies of 27 us.
- Outputs: figure 19 has 2,279 active at its peak. If that is at 40 requests/s and 49.08 ms (section 6.6), which is our
  reading, and the mean is a twentieth below the peak, Little's law makes it 1,100 tokens.
- Long prompts: vLLM's 37.99 ms on average and 51.93 at P99 with 10 requests/s of Issue 1 % (section 7) come of a few
  long requests on instances of their own: 200,000 tokens on average, very unequal. Figure 5(b)'s mean of 184.3 us
  would ask for twice that; the KV memory of 32 instances at the 45 requests/s of section 7's 5 % cohort has room for
  270,000 each.
- What is left of 49.08 ms at 40 requests/s is the time of a layer's small kernels: 175 us.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """A value, its unit, why it is so, and the published results that it was chosen by."""

    value: float
    unit: str
    source: str
    claims: tuple[str, ...] = ()


# What published results are called here and in reports: paper, place, what.
NANOCP_LIGHT = "nanocp/fig5b/attention of light instances 40-55 us"
NANOCP_MOE = "nanocp/fig15/largest dispatch+combine 350.9 us"
NANOCP_CP = "nanocp/6.5/CP communication 60.4 us per request"
NANOCP_CP8 = "nanocp/6.5/CP communication 629.8 us uniform CP8"
NANOCP_TPOT = "nanocp/6.6/mean TPOT 49.08 ms at 40 requests/s"
NANOCP_ACTIVE = "nanocp/fig19/25 of 2,279 active requests use CP"
NANOCP_VLLM = "nanocp/7/TPOT 37.99 ms, P99 51.93 ms, Issue 1 % at 10 requests/s, without TBO"
NANOCP_COHORT = "nanocp/7/cohort of Issue 5 % at 45 requests/s"
NANOCP_CONTROL = "nanocp/6.7/control plane 1.42-2.61 % of a step"
NANOCP_CAPACITY = "nanocp/1/KV capacity about 1M tokens an instance"
SMARTGEN_RATIO = "smartgen/1/transfer 6.5x of prefill at 48K tokens"
SMARTGEN_A100 = "smartgen/fig2b/A100 1.9x of L20 at 60K tokens"

# Of the roofline; a scenario may replace any.
CONSTANTS: dict[str, Constant] = {
    # -- attention kernels -------------------------------------------------------------------------------------------
    "attention_flops_share": Constant(
        660 / 989, "of peak", "FlashMLA README: 660 TFLOP/s at decode where computing limits, H800 (989 at peak)"
    ),
    "attention_memory_share": Constant(
        3000 / 3350, "of peak", "FlashMLA README: 3,000 GB/s at decode where memory limits, H800 (3,350 at peak)"
    ),
    "attention_sequence_tokens": Constant(
        5 * 64 + 32,
        "tokens",
        "FlashMLA's tile scheduler reckons 5 blocks of 64 tokens for each sequence; half of its last block is empty",
    ),
    "attention_launch_s": Constant(5e-6, "s", "assumed: one kernel and the one that combines its splits"),
    # -- products with weights ---------------------------------------------------------------------------------------
    "gemm_flops_share": Constant(0.6, "of peak", "assumed, for batches of a decode step"),
    "gemm_memory_share": Constant(0.8, "of peak", "assumed, for reading weights"),
    # -- MoE communication -------------------------------------------------------------------------------------------
    "dispatch_latency_s": Constant(
        42e-6, "s", "DeepEP's low-latency table, EP 16 to 64: what its bytes at 50 GB/s between nodes leave"
    ),
    "combine_latency_s": Constant(53e-6, "s", "as dispatch_latency_s"),
    # -- context parallelism -----------------------------------------------------------------------------------------
    "cp_latency_s": Constant(27e-6, "s a route", "half of 60.4 us less its bytes", (NANOCP_CP,)),
    "cp_fabric_share": Constant(
        0.74, "of peak", "629.8 us less latencies, at the M of 350.9 us", (NANOCP_CP8, NANOCP_MOE)
    ),
    # -- the rest of a step ------------------------------------------------------------------------------------------
    "layer_small_s": Constant(175e-6, "s a layer", "what 49.08 ms leaves: norms, gating, copies", (NANOCP_TPOT,)),
    "step_once_s": Constant(1e-3, "s a step", "2 % of 50 ms: scheduling, metadata, sampling", (NANOCP_CONTROL,)),
    # -- memory ------------------------------------------------------------------------------------------------------
    "memory_share": Constant(
        0.83,
        "of a device",
        "for weights and KV: vLLM's 0.9, less graphs (5.3 GiB, table 2) and buffers; leaves Kimi-K2 about 1M tokens",
        (NANOCP_CAPACITY,),
    ),
    # -- prefill -----------------------------------------------------------------------------------------------------
    "prefill_share": Constant(0.7, "of peak", "assumed, where nothing below is said of the machine"),
    "prefill_share_L20": Constant(
        0.96, "of peak", "Llama-3.1-8B, 48K tokens on 6 GPUs, 75 % cached, against 25 Gbps", (SMARTGEN_RATIO,)
    ),
    "prefill_share_A100": Constant(0.70, "of peak", "1.9x of an L20's rate", (SMARTGEN_A100,)),
    "prefill_launch_s": Constant(5e-3, "s", "assumed: a step's launches and sampling"),
}

# Lengths of the synthetic workloads (mixes).
LENGTHS: dict[str, Constant] = {
    "short_prompt_median": Constant(150, "tokens", "context of light instances", (NANOCP_LIGHT,)),
    "short_prompt_sigma": Constant(1.0, "", "assumed: chats differ much"),
    "output_median": Constant(970, "tokens", "Little's law", (NANOCP_ACTIVE, NANOCP_TPOT)),
    "output_sigma": Constant(0.5, "", "assumed"),
    "long_prompt_median": Constant(140_000, "tokens", "stragglers that few make", (NANOCP_VLLM, NANOCP_COHORT)),
    "long_prompt_sigma": Constant(1.0, "", "as long_prompt_median", (NANOCP_VLLM,)),
}


ALL = {**CONSTANTS, **LENGTHS}


def constant(name: str) -> float:
    """The value of a constant."""
    return ALL[name].value


def used(claim: str) -> bool:
    """Whether a constant was chosen by this published result, so that it can not count as reproduced."""
    return any(claim in constant.claims for constant in ALL.values())
