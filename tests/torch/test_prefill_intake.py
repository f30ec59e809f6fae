"""What reaches a prefill instance in the middle of a step, in the order in which it was sent."""

from pathlib import Path

from narrows.config import EngineConfig
from narrows.core.ids import InstanceId, RequestId
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.testing.cluster import MemoryCluster
from narrows.testing.models import tiny_model

CONFIG = EngineConfig(
    dtype="float32",
    kernels="reference",
    max_model_len=128,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=2 * 2**20,
)


def test_a_landing_may_come_with_its_prompt_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The prompt waits for the next turn, so its landing, though urgent, must not be lost before it."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = (Request(RequestId(f"r{i}"), tuple(range(i, i + 20)), params) for i in range(2))
    with MemoryCluster(CONFIG, tiny_model(tmp_path)) as cluster:
        instance = cluster.instances[InstanceId("prefill-0")]
        intake = instance.intake
        submitted = False

        def intake_with_company() -> None:
            nonlocal submitted
            if not submitted:
                submitted = True
                cluster.submit(second)
                cluster.between(InstanceId("prefill-0"))  # Prefill and Reserve go out
                cluster.instances[InstanceId("decode-0")].turn()  # room is made
                cluster.between(InstanceId("prefill-0"))  # Push goes out
            intake()

        instance.intake = intake_with_company  # type: ignore[method-assign]
        cluster.submit(first)
        for _ in range(200):
            cluster.turn()
        assert submitted
        assert [cluster.ending(request.id) for request in (first, second)] == [FinishReason.LENGTH] * 2
