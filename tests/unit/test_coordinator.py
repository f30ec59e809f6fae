"""The coordinator against instances played by hand and by chance: one ending each, books that balance, a safe order."""

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.plan import Landing, RegionKey
from narrows.core.request import FinishReason, Request, SampledToken, SamplingParams
from narrows.core.topology import InstanceInfo
from narrows.core.wire import (
    Delivered,
    Failed,
    Prefill,
    Produced,
    Progress,
    Push,
    Ready,
    Release,
    Released,
    Reserve,
    Reserved,
    Started,
    ToInstance,
)
from narrows.errors import QueueFull, RequestError
from narrows.kv.layout import pages_for
from narrows.metrics.definitions import check_lifetime
from narrows.runtime.client import Output
from narrows.runtime.coordinator import Coordinator
from narrows.sched.registry import POLICIES, make_policy

PAGE = 4
KEY = RegionKey("null", "", 0)
P0, D0 = InstanceId("prefill-0"), InstanceId("decode-0")


def info(name: str, role: Role, *, num_pages: int = 64, seqs: int = 4) -> InstanceInfo:
    return InstanceInfo(InstanceId(name), role, "0", name, num_pages, PAGE, seqs, 100, 1000)


class Bench:
    """A coordinator with its events and outputs recorded, and time moved by hand."""

    def __init__(
        self, *infos: InstanceInfo, max_queue: int = 100, policy: str = "least-batch", replays: bool = False
    ) -> None:
        self.events: list[Event] = []
        self.outputs: dict[str, list[Output]] = defaultdict(list)
        self.coordinator = Coordinator(
            make_policy(policy),
            replays=replays,
            max_queue=max_queue,
            max_model_len=100,
            vocab_size=1000,
            observe=self.events.append,
        )
        self.now = 0.0
        for one in infos:
            self.say(one.id, Ready(one))

    def say(self, instance: InstanceId, message: Ready | Progress) -> None:
        self.now += 1.0
        self.coordinator.receive(instance, message, self.now)

    def submit(self, name: str, length: int = 6, max_tokens: int | None = 3) -> None:
        self.now += 1.0
        request = Request(RequestId(name), tuple(range(1, length + 1)), SamplingParams(max_tokens=max_tokens))
        self.coordinator.submit(request, self.outputs[name].append, self.now)

    def sent(self) -> list[tuple[InstanceId, ToInstance]]:
        messages = list(self.coordinator.outbox)
        self.coordinator.outbox.clear()
        return messages

    def endings(self, name: str) -> list[FinishReason]:
        return [o.finish_reason for o in self.outputs[name] if o.finish_reason is not None]


def landing(request: str, generation: int, num_tokens: int) -> Landing:
    return Landing(request, generation, D0, "there", KEY, KEY, 256, ((0, num_tokens),))


def token(name: str, generation: int, index: int, id: int, reason: FinishReason | None = None) -> Produced:
    return Produced(name, generation, index, SampledToken(id), reason)


def both() -> Bench:
    return Bench(info("prefill-0", Role.PREFILL), info("decode-0", Role.DECODE))


def test_a_request_goes_its_way_and_leaves_nothing_behind() -> None:
    bench = both()
    bench.submit("a")
    (p, prefill), (d, reserve) = bench.sent()
    assert (p, d) == (P0, D0)
    assert isinstance(prefill, Prefill) and isinstance(reserve, Reserve)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    ((_, push),) = bench.sent()
    assert isinstance(push, Push)
    bench.say(P0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0, handover_bytes=500),)))
    bench.say(P0, Progress(released=(Released("a", 0),)))
    bench.say(D0, Progress(produced=(token("a", 0, 1, 12),)))
    bench.say(D0, Progress(produced=(token("a", 0, 2, 13, FinishReason.LENGTH),)))
    assert [t.id for o in bench.outputs["a"] for t in o.tokens] == [11, 12, 13]
    assert bench.endings("a") == [FinishReason.LENGTH]
    assert bench.coordinator.num_holds == bench.coordinator.num_live == 0
    assert bench.sent() == []
    check_lifetime(bench.events)
    assert [e.num_bytes for e in bench.events if e.kind is EventKind.HANDOVER_DONE] == [500]


def test_one_token_needs_no_decode() -> None:
    bench = both()
    bench.submit("a", max_tokens=1)
    ((instance, prefill),) = bench.sent()
    assert instance == P0 and isinstance(prefill, Prefill)
    bench.say(P0, Progress(produced=(token("a", 0, 0, 5, FinishReason.LENGTH),)))
    assert bench.sent() == [(P0, Release("a", 0))]
    bench.say(P0, Progress(released=(Released("a", 0),)))
    assert bench.coordinator.num_holds == 0


def test_prefill_begins_without_decode_room_and_room_is_given_in_order() -> None:
    bench = Bench(info("prefill-0", Role.PREFILL), info("decode-0", Role.DECODE, seqs=1))
    for name in "abc":
        bench.submit(name)
    prefills = [m.request.id for _, m in bench.sent() if isinstance(m, Prefill)]
    assert prefills == ["a", "b", "c"]
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.sent()
    bench.coordinator.abort(RequestId("a"), bench.now)
    bench.say(P0, Progress(released=(Released("a", 0),)))
    bench.say(D0, Progress(released=(Released("a", 0),)))
    assert [m.request.id for _, m in bench.sent() if isinstance(m, Reserve)] == ["b"]


def placed(policy: str, *lengths: int, num_pages: int = 64, seqs: int = 4) -> list[str]:
    """Where requests of these lengths are sent at decode, one after the other, of three instances."""
    decode = [info(f"decode-{i}", Role.DECODE, num_pages=num_pages, seqs=seqs) for i in range(3)]
    bench = Bench(info("prefill-0", Role.PREFILL, num_pages=1000, seqs=100), *decode, policy=policy)
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", length)
    return [instance.removeprefix("decode-") for instance, m in bench.sent() if isinstance(m, Reserve)]


def test_the_policy_places_at_decode() -> None:
    """By hand: a long request, then short ones. Who looks at KV or pages leaves the long one's instance alone."""
    assert placed("least-batch", 60, 5, 5, 5, 5) == ["0", "1", "2", "1", "2"], "of equal batches the most free pages"
    assert placed("least-cache", 60, 5, 5, 5, 5) == ["0", "1", "2", "1", "2"]
    assert placed("least-cache", 60, 5, 50, 5, 5, 5, 5) == [*"0121112"], "four are all it works on"
    assert placed("round-robin", 60, 5, 5, 5, 5) == ["0", "1", "2", "0", "1"]
    assert placed("vllm", 60, 5, 5, 5, 5) == ["0", "1", "2", "0", "1"]
    assert placed("dynamo-cost", 60, 5, 5, 5, 5) == ["0", "1", "2", "1", "2"]


def test_what_one_instance_can_not_hold_waits_whatever_the_policy() -> None:
    """Pools of four pages, each of four tokens, the next token's place included."""
    for name in (name for name in POLICIES if POLICIES[name].local):
        assert len(placed(name, *[15] * 5, num_pages=4)) == 3
        assert placed(name, 16, num_pages=4) == []
        assert len(placed(name, *[1] * 9, seqs=2)) == 6


def test_turns_go_on_when_requests_have_ended() -> None:
    """One request at a time: its instance would always be the first if turns were those of who is there."""
    decode = [info(f"decode-{i}", Role.DECODE) for i in range(3)]
    bench = Bench(info("prefill-0", Role.PREFILL), *decode, policy="round-robin")
    seen = []
    for i in range(6):
        bench.submit(f"r{i}")
        (instance,) = [instance for instance, m in bench.sent() if isinstance(m, Reserve)]
        seen.append(instance)
        bench.coordinator.abort(RequestId(f"r{i}"), bench.now)
        bench.say(P0, Progress(released=(Released(f"r{i}", 0),)))
        bench.say(instance, Progress(released=(Released(f"r{i}", 0),)))
        bench.sent()
    assert seen == [f"decode-{i % 3}" for i in range(6)]


def test_the_group_that_policies_see_is_what_the_books_say() -> None:
    """By hand: a decodes with 6 + 2 tokens, whose next one needs a third page; b is on its way with 3 + 1; c has no
    decode instance yet."""
    bench = Bench(info("prefill-0", Role.PREFILL), info("decode-0", Role.DECODE, seqs=2))
    for name, length in (("a", 6), ("b", 3), ("c", 9)):
        bench.submit(name, length, 9)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 1, 12), token("a", 0, 2, 13))))
    view = bench.coordinator.group_view([D0])
    assert (view.active.moe.tolist(), view.active.shards.tolist()) == ([0], [8])
    assert view.arriving is not None and view.arriving.tolist() == [1] and view.batches.tolist() == [2]
    assert (view.kv_tokens.tolist(), view.used_pages.tolist()) == ([8 + 3], [3 + 1])
    assert (view.num_pages.tolist(), view.page_size, view.max_num_seqs, view.num_placed) == ([64], PAGE, 2, 2)


def test_decode_lets_go_only_after_prefill_has() -> None:
    bench = both()
    bench.submit("a")
    bench.sent()
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.sent()
    bench.coordinator.abort(RequestId("a"), bench.now)
    assert bench.endings("a") == [FinishReason.ABORT]
    assert bench.sent() == [(P0, Release("a", 0))]
    bench.say(P0, Progress(released=(Released("a", 0),)))
    assert bench.sent() == [(D0, Release("a", 0))]
    bench.say(D0, Progress(released=(Released("a", 0),)))
    assert bench.coordinator.num_holds == 0


def test_a_lost_decode_instance_costs_time_not_tokens() -> None:
    bench = both()
    bench.submit("a", max_tokens=5)
    bench.sent()
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 1, 12),)))
    bench.sent()
    bench.coordinator.instance_lost(D0, "killed", bench.now)
    again = [m for _, m in bench.sent() if isinstance(m, Prefill)]
    assert again[0].request.tokens == (1, 2, 3, 4, 5, 6, 11, 12)
    assert again[0].request.generation == 1
    bench.say(P0, Progress(produced=(token("a", 0, 0, 99),)))  # too late: of the attempt that is over
    bench.say(P0, Progress(produced=(token("a", 1, 2, 13),)))
    assert [t.id for o in bench.outputs["a"] for t in o.tokens] == [11, 12, 13]


def test_what_decode_had_computed_is_decoded_again_where_it_selects() -> None:
    """The prompt alone is prefilled, room is taken for it alone, and no token reaches the caller twice."""
    bench = Bench(info("prefill-0", Role.PREFILL), info("decode-0", Role.DECODE), replays=True)
    bench.submit("a", max_tokens=3)
    (_, first), _ = bench.sent()
    assert isinstance(first, Prefill) and first.request.known == ()
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 1, 12),)))
    bench.coordinator.instance_lost(D0, "killed", bench.now)
    bench.say(D0, Ready(info("decode-0", Role.DECODE)))
    bench.say(P0, Progress(released=(Released("a", 0),)))
    sent = [message for _, message in bench.sent() if isinstance(message, Prefill | Reserve)]
    assert len(sent) == 2
    for message in sent:  # one token is left to produce, which prefill of everything would have given
        assert message.request.tokens == (1, 2, 3, 4, 5, 6)
        assert message.request.known == (11, 12)
        assert message.request.generation == 1
    bench.say(D0, Progress(reserved=(Reserved("a", 1, landing("a", 1, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 1, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 1),), produced=(token("a", 1, 1, 12),)))
    assert bench.outputs["a"][-1].tokens[0].id == 12 and len(bench.outputs["a"]) == 2
    bench.say(D0, Progress(produced=(token("a", 1, 2, 13, FinishReason.LENGTH),)))
    assert [t.id for o in bench.outputs["a"] for t in o.tokens] == [11, 12, 13]
    assert bench.endings("a") == [FinishReason.LENGTH]


def test_a_lost_prefill_instance_does_not_matter_once_kv_has_arrived() -> None:
    bench = both()
    bench.submit("a", max_tokens=5)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0),)))
    bench.sent()
    bench.coordinator.instance_lost(P0, "killed", bench.now)
    assert bench.sent() == []
    bench.say(D0, Progress(produced=(token("a", 0, 1, 12, FinishReason.STOP),)))
    assert bench.endings("a") == [FinishReason.STOP]


def test_decode_may_be_heard_before_prefill() -> None:
    bench = both()
    bench.submit("a", max_tokens=3)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(D0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 1, 12),)))
    bench.say(D0, Progress(produced=(token("a", 0, 2, 13, FinishReason.LENGTH),)))
    assert bench.outputs["a"] == []
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    assert [t.id for o in bench.outputs["a"] for t in o.tokens] == [11, 12, 13]
    assert bench.endings("a") == [FinishReason.LENGTH]


def test_a_first_token_that_died_with_prefill_is_computed_again() -> None:
    bench = both()
    bench.submit("a", max_tokens=5)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(D0, Progress(started=(Started("a", 0),), produced=(token("a", 0, 1, 12),)))
    bench.sent()
    bench.coordinator.instance_lost(P0, "killed", bench.now)
    assert bench.sent() == [(D0, Release("a", 0))]
    bench.say(P0, Ready(info("prefill-0", Role.PREFILL)))
    assert [m.request.generation for _, m in bench.sent() if isinstance(m, Prefill)] == [1]


def test_a_sink_may_take_its_request_back() -> None:
    bench = both()
    endings: list[Output] = []

    def sink(output: Output) -> None:
        endings.append(output)
        if output.tokens:
            bench.coordinator.abort(RequestId("a"), bench.now, FinishReason.STOP)

    bench.coordinator.submit(Request(RequestId("a"), (1, 2), SamplingParams(max_tokens=1)), sink, 0.0)
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11, FinishReason.LENGTH),)))
    assert [o.finish_reason for o in endings] == [None, FinishReason.STOP]


def test_losses_without_end_become_an_error() -> None:
    bench = both()
    bench.submit("a")
    for generation in range(3):
        bench.say(P0, Progress(failed=(Failed("a", generation, "link down", retry=True),)))
    (last,) = [o for o in bench.outputs["a"] if o.finish_reason]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "gave up after 3 attempts: link down"


def test_what_can_not_be_served_is_refused_and_nothing_is_kept() -> None:
    bench = Bench(max_queue=1)
    for prompt, text in (
        ((), "empty"),
        (tuple(range(100)), "at most 100"),
        ((1, 1000), "1000 is not in"),
        ((-1,), "-1"),
    ):
        with pytest.raises(RequestError, match=text):
            bench.coordinator.submit(Request(RequestId("x"), prompt), lambda output: None, 0.0)
    bench.submit("a")
    with pytest.raises(QueueFull):
        bench.submit("b")
    with pytest.raises(RequestError, match="in use"):
        bench.submit("a")
    assert bench.coordinator.num_live == 1


class Actor:
    """An instance that follows the protocol, at a pace given by chance, and checks what it is told."""

    def __init__(self, me: InstanceInfo, chance: random.Random) -> None:
        self.info = me
        self.chance = chance
        self.inbox: deque[ToInstance] = deque()
        self.held: dict[tuple[str, int], Request] = {}
        self.done: set[tuple[str, int]] = set()  # prefill: token sampled; decode: running
        self.landings: dict[tuple[str, int], Landing] = {}

    def turn(self, prefills: dict[tuple[str, int], bool]) -> Progress:
        """`prefills`: attempts that prefill has not let go of, and whether their hand-over is complete."""
        parts: dict[str, list[object]] = defaultdict(list)
        for _ in range(self.chance.randint(0, len(self.inbox))):
            self.take(self.inbox.popleft(), parts, prefills)
        for key, request in list(self.held.items()):
            if self.chance.random() < 0.5:
                self.work(key, request, parts, prefills)
        return Progress(**{name: tuple(items) for name, items in parts.items()})  # type: ignore[arg-type]

    def take(self, message: ToInstance, parts: dict[str, list[object]], prefills: dict[tuple[str, int], bool]) -> None:
        if isinstance(message, Prefill):
            key = (message.request.id, message.request.generation)
            self.held[key] = message.request
            prefills[key] = False
        elif isinstance(message, Push):
            key = (message.landing.request, message.landing.generation)
            if key in self.held:
                self.landings[key] = message.landing
        elif isinstance(message, Reserve):
            key = (message.request.id, message.request.generation)
            used = sum(pages_for(len(r.tokens) + 1, PAGE) for r in self.held.values())
            fits = (
                len(self.held) < self.info.max_num_seqs
                and used + pages_for(len(message.request.tokens) + 1, PAGE) <= self.info.num_pages
            )
            if fits:
                self.held[key] = message.request
            parts["reserved"].append(Reserved(*key, landing(*key, len(message.request.tokens)) if fits else None))
        elif isinstance(message, Release):
            key = (message.request, message.generation)
            if self.info.role is Role.DECODE:
                assert key not in prefills, "decode told to let go while prefill may still write"
            self.drop(key, prefills)
            parts["released"].append(Released(*key))

    def drop(self, key: tuple[str, int], prefills: dict[tuple[str, int], bool]) -> None:
        self.held.pop(key, None)
        self.landings.pop(key, None)
        self.done.discard(key)
        if self.info.role is Role.PREFILL:
            prefills.pop(key, None)

    def work(
        self,
        key: tuple[str, int],
        request: Request,
        parts: dict[str, list[object]],
        prefills: dict[tuple[str, int], bool],
    ) -> None:
        limit = request.params.max_tokens or 1
        if self.info.role is Role.PREFILL:
            if key not in self.done:
                self.done.add(key)
                last = len(request.output) + 1 >= limit
                parts["produced"].append(
                    token(*key, len(request.output), 500 + len(request.output), FinishReason.LENGTH if last else None)
                )
            elif key in self.landings and not prefills[key]:
                prefills[key] = True
            elif prefills[key]:
                self.drop(key, prefills)
                parts["released"].append(Released(*key))
        elif key in self.done:
            last = len(request.output) + 1 >= limit
            parts["produced"].append(
                token(*key, len(request.output), 500 + len(request.output), FinishReason.LENGTH if last else None)
            )
            self.held[key] = Request(
                request.id, request.prompt, request.params, 0.0, (*request.output, 0), request.generation
            )
            if last:
                self.drop(key, prefills)
            elif self.chance.random() < 0.1:
                self.drop(key, prefills)
                parts["failed"].append(Failed(*key, error="full", retry=True, held=False))
        elif prefills.get(key, True) and self.chance.random() < 0.7:
            self.done.add(key)
            self.held[key] = Request(
                request.id, request.prompt, request.params, 0.0, (*request.output, 0), request.generation
            )
            parts["started"].append(Started(*key))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([name for name in POLICIES if POLICIES[name].local]),
)
def test_whatever_happens_each_request_ends_once_and_nothing_is_held(
    seed: int, num_prefill: int, num_decode: int, losses: bool, policy: str
) -> None:
    chance = random.Random(seed)
    infos = [info(f"prefill-{i}", Role.PREFILL, num_pages=20, seqs=3) for i in range(num_prefill)]
    infos += [info(f"decode-{i}", Role.DECODE, num_pages=20, seqs=2) for i in range(num_decode)]
    bench = Bench(*infos, policy=policy)
    actors = {one.id: Actor(one, chance) for one in infos}
    prefills: dict[tuple[str, int], bool] = {}
    names = [f"r{i}" for i in range(12)]
    waiting = list(names)
    for turn in range(4000):
        if waiting and chance.random() < 0.3:
            bench.submit(waiting.pop(), chance.randint(1, 30), chance.randint(1, 6))
        if turn < 200 and chance.random() < 0.03:
            bench.coordinator.abort(RequestId(chance.choice(names)), bench.now)
        if losses and turn < 200 and chance.random() < 0.02:
            lost = actors[chance.choice(infos).id]
            for key in list(lost.held):
                lost.drop(key, prefills)
            actors[lost.info.id] = Actor(lost.info, chance)
            bench.coordinator.instance_lost(lost.info.id, "killed", bench.now)
            bench.say(lost.info.id, Ready(lost.info))
        for instance, message in bench.sent():
            actors[instance].inbox.append(message)
        for actor in actors.values():
            progress = actor.turn(prefills)
            if progress != Progress():
                bench.say(actor.info.id, progress)
        if not waiting and not bench.coordinator.num_live and not bench.coordinator.num_holds:
            break
    assert not bench.coordinator.num_live, "a request never ended"
    assert not bench.coordinator.num_holds, "something is held for ever"
    assert all(not actor.held for actor in actors.values())
    assert all(len(bench.endings(name)) == 1 for name in names)
    check_lifetime(bench.events)


def test_pages_that_are_written_to_outlive_their_request_at_decode() -> None:
    """A request may end at decode before all its KV is there: prefill lets go first, then decode."""
    bench = both()
    bench.submit("a", max_tokens=5)
    bench.say(D0, Progress(reserved=(Reserved("a", 0, landing("a", 0, 6)),)))
    bench.say(P0, Progress(produced=(token("a", 0, 0, 11),)))
    bench.say(D0, Progress(started=(Started("a", 0),)))
    bench.sent()
    bench.say(D0, Progress(produced=(replace(token("a", 0, 1, 12, FinishReason.STOP), held=True),)))
    assert bench.endings("a") == [FinishReason.STOP], "its caller does not wait"
    assert bench.sent() == [(P0, Release("a", 0))]
    assert bench.coordinator.num_holds == 1
    delivered = Delivered("a", 0, proactive_bytes=10)
    bench.say(P0, Progress(delivered=(delivered,), released=(Released("a", 0),)))
    assert bench.sent() == [(D0, Release("a", 0))]
    bench.say(D0, Progress(released=(Released("a", 0),)))
    assert bench.coordinator.num_holds == 0
    assert [event.delivered for event in bench.events if event.kind is EventKind.DELIVERED] == [delivered]


def test_being_preempted_is_no_loss_however_often() -> None:
    bench = both()
    bench.submit("a", max_tokens=50)
    for generation in range(6):
        bench.say(D0, Progress(reserved=(Reserved("a", generation, landing("a", generation, 6)),)))
        bench.say(D0, Progress(failed=(Failed("a", generation, "no room", retry=True, preempted=True),)))
        bench.sent()
        for instance in (P0, D0):
            bench.say(instance, Progress(released=(Released("a", generation),)))
        bench.sent()
    assert bench.endings("a") == []
