"""From a scenario as a person writes it to what the simulator runs: names looked up, units converted."""

from narrows.core.scheme import SCHEMES
from narrows.errors import ConfigError
from narrows.kv.layout import pages_for
from narrows.sched.registry import make_policy
from narrows.sim.ablations import DenseCollective, PiecewiseGraph
from narrows.sim.cluster_file import Scenario
from narrows.sim.cost import Cost
from narrows.sim.group import GroupOptions, GroupShape
from narrows.sim.handover import HandOverModel
from narrows.sim.run import PrefillShape, Setup
from narrows.sim.workload import Trace


def make_setup(scenario: Scenario, trace: Trace | None = None) -> Setup:
    """`trace` None: the scenario's own. Raises ConfigError naming table and field."""
    said, decode = scenario.cluster, scenario.decode
    if not decode.lock_step:
        try:
            policy = make_policy(scenario.policy.name, local=True)
        except ConfigError as error:
            raise ConfigError(f"policy.name: {str(error).removeprefix('policy: ')}") from None
    else:
        policy = make_policy(scenario.policy.name)
    shape = GroupShape(
        num_instances=said.num_decode,
        per_node=said.instances_per_node,
        num_pages=scenario.kv_tokens // said.page_size,
        page_size=said.page_size,
        max_num_seqs=said.max_num_seqs,
        cross_nodes=decode.cross_nodes,
    )
    trace = scenario.trace() if trace is None else trace
    return Setup(
        trace=trace,
        cost=_decode_cost(scenario),
        policy=policy,
        decode=shape,
        prefill=_prefill(scenario, trace) if said.prefill_instances else None,
        lock_step=decode.lock_step,
        options=GroupOptions(
            reuse=scenario.policy.steps, two_batch_overlap=decode.two_batch_overlap, aging_s=decode.aging_s
        ),
        first_token_at_start=decode.first_token == "admission",
    )


def _decode_cost(scenario: Scenario) -> Cost:
    cost = scenario.decode_cost()
    if scenario.decode.routes == "collective":
        cost = DenseCollective(cost, scenario.cluster.instances_per_node)
    if scenario.decode.graphs == "piecewise":
        cost = PiecewiseGraph(cost, scenario.decode.graph_gap_us * 1e-6)
    return cost


def _prefill(scenario: Scenario, trace: Trace) -> PrefillShape:
    """Prefill instances have as many pages as decode instances, or what the longest request takes where that is more:
    it is not prefill that limits how long a request may be. Where nothing can be shared, nothing is looked for."""
    longest = max((arrival.num_tokens for arrival in trace), default=0) + 1
    said, hardware, model = scenario.cluster, scenario.prefill_hardware, scenario.model_shape
    token_bytes = model.kv_bytes_per_token_layer(scenario.model.kv)
    return PrefillShape(
        cost=scenario.prefill_cost(),
        num_instances=said.prefill_instances,
        num_pages=pages_for(max(scenario.kv_tokens, longest), said.page_size),
        page_size=said.page_size,
        link_bytes_per_s=hardware.link_bytes_per_s,
        link_latency_s=hardware.link_latency_s,
        handover=HandOverModel(
            num_layers=model.num_layers,
            token_bytes=token_bytes,
            metadata_bytes=scenario.policy.metadata_ratio * token_bytes,
            scheme=SCHEMES[scenario.policy.transfer],
            select_ratio=scenario.policy.select_ratio,
            on_demand_ratio=scenario.policy.on_demand_ratio,
        ),
        max_num_seqs=said.max_num_seqs,
        max_num_batched_tokens=said.max_num_batched_tokens,
        reuse_prefixes=any(arrival.prefix_ids for arrival in trace),
    )
