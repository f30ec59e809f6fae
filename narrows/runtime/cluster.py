"""A cluster on this machine behind the Client contract: one thread drives coordinator, control channel and launcher."""

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import zmq

from narrows.config import EngineConfig
from narrows.core.clock import Clock, MonotonicClock
from narrows.core.events import Event
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request
from narrows.core.scheme import Scheme
from narrows.core.trace import Span
from narrows.core.wire import Adopt, Prefill, Ready, Refused, Shutdown, Traced
from narrows.errors import ConfigError, NarrowsError, RequestError, TransportError, Unavailable
from narrows.kernels.build import prepare
from narrows.metrics.export import PrometheusExporter
from narrows.metrics.trace import write_chrome_trace
from narrows.models.catalog import MODELS, resolve
from narrows.models.gguf.cache import Progress
from narrows.models.spec import read_spec
from narrows.runtime.channel import ZmqHub
from narrows.runtime.client import InstanceStatus, ServedModel, Sink, Status
from narrows.runtime.coordinator import Coordinator
from narrows.runtime.files import ProfileFiles, Snapshots
from narrows.runtime.launch_local import Launcher, Worker
from narrows.runtime.sizing import plan_sizes
from narrows.sched.registry import make_policy
from narrows.transfer.codec import decode, encode

TURN_MS = 200  # how often deaths and silence are looked for when nothing comes
CLOSE_TIMEOUT_S = 5.0
RESTART_WINDOW_S = 600.0  # restarts are counted within it
_log = logging.getLogger(__name__)

Observer = Callable[[Event], None]
T = TypeVar("T")


def open_cluster(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    observers: Sequence[Observer] = (),
    ensure_files: Callable[[EngineConfig, Path], ProfileFiles] | None = None,
) -> "LocalCluster":
    """Find the model (converting a GGUF file the first time, with `progress`), check the sizes, build the kernels (the
    first time, which `say` announces) and with `ensure_files` what was measured for selection, start the instances.

    Returns while they load: see `wait_ready`. Raises ModelError and ConfigError before anything is started.
    """
    if config.trace is not None:
        _check_writable(Path(config.trace))
    folder = resolve(config.model, progress=progress)
    spec = read_spec(folder)
    sizes = plan_sizes(config, spec)
    name = config.served_model_name or (config.model if config.model in MODELS else Path(config.model).resolve().stem)
    if config.kernels != "reference":
        prepare(say)  # here, so that not every instance does
    files = ProfileFiles() if ensure_files is None else ensure_files(config, folder)
    model = ServedModel(name, str(folder), sizes.max_model_len, spec.vocab_size)
    return LocalCluster(config, model, observers=observers, files=files)


def _check_writable(trace: Path) -> None:
    """The timeline is written at the end, which is too late to hear that it can not be."""
    there = trace.exists()
    try:
        trace.open("a").close()
        if not there:
            trace.unlink()
    except OSError as error:
        raise ConfigError(
            f"trace: {trace} can not be written: {error.strerror}; name a file in a folder that exists and is yours"
        ) from error


class StartFailed(NarrowsError):
    """An instance could not start; the text is its own."""


class LocalCluster:
    """Implements Client. Made by `open_cluster`; `close` it."""

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        *,
        observers: Sequence[Observer] = (),
        files: ProfileFiles,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self._config = config
        self._clock = clock or MonotonicClock()
        self._exporter = PrometheusExporter()
        self._observers = (self._exporter.observe, *observers)
        self._random = SystemRandom()
        self._lock = threading.RLock()  # guards all below; a sink may call back
        self._coordinator = Coordinator(
            make_policy(config.policy, local=True),
            replays=config.select != "none",
            max_queue=config.max_queue,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            observe=self._observe,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hub = ZmqHub(self._context)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_out.bind("inproc://wake")
        self._wake_in.connect("inproc://wake")
        self._source = files.importance
        self._profiles = Snapshots()
        if files.importance is not None:  # an instance that starts again does so from what the others follow
            files = replace(files, importance=self._profiles.replace(Path(files.importance)))
        self._launcher = Launcher(config, model, self._hub.address, files)
        self._spans: dict[InstanceId, list[Span]] = defaultdict(list)
        self._adopted: Adopt | None = None  # what prefill instances follow instead of what they started with
        self._workers: dict[InstanceId, Worker] = {}
        self._restarts: dict[InstanceId, list[float]] = defaultdict(list)  # when
        self._changed = threading.Condition(self._lock)  # readiness, failure, closing
        self.failure = ""  # why the cluster can not serve any more, once it can not
        self._closing = False
        self._looked_s = self._clock.now()
        for role, count in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for i in range(count):
                self._launch(InstanceId(f"{role}-{i}"), role)
        self._thread = threading.Thread(target=self._run, name="narrows-cluster", daemon=True)
        self._thread.start()

    # ---- Client

    def submit(self, request: Request, sink: Sink) -> None:
        if request.params.seed is None:
            seed = self._random.getrandbits(63)
            request = replace(request, params=replace(request.params, seed=seed))
        try:
            decode(encode(Prefill(request)))
        except (TransportError, TypeError, ValueError, OverflowError) as error:
            raise RequestError("request", f"can not be sent to an instance: {error}") from error
        with self._lock:
            if self._closing or self.failure:
                raise Unavailable(self.failure or "the server is shutting down")
            self._coordinator.submit(request, partial(_guarded, sink), self._clock.now())
            self._wake()

    def abort(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._lock:
            if not self._closing:
                self._coordinator.abort(request, self._clock.now(), reason)
                self._wake()

    def status(self) -> Status:
        with self._lock:
            members = self._coordinator.members()
            views = {view.id: view for view in self._coordinator.view().instances}
            instances = tuple(
                InstanceStatus(
                    id=name,
                    role=worker.role,
                    ready=name in members,
                    running=members[name].load.running if name in members else 0,
                    waiting=members[name].load.waiting if name in members else 0,
                    used_pages=members[name].load.used_pages if name in members else 0,
                    num_pages=views[name].num_pages if name in members else 0,
                    restarts=len(self._restarts[name]),
                )
                for name, worker in sorted(self._workers.items())
            )
            missing = [role for role in Role if not self._coordinator.has(role)]
            reason = self.failure or ("no " + " and no ".join(missing) + " instance is ready" if missing else "")
            return Status(not reason and not self._closing, self._coordinator.num_queued, instances, reason)

    def metrics(self) -> str:
        with self._lock:
            self._exporter.set_queued(self._coordinator.num_queued)
            for member in self._coordinator.members().values():
                self._exporter.set_load(member.info, member.load)
        return self._exporter.render()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._coordinator.abort_all(self._clock.now())
            self._changed.notify_all()
            self._wake()
        self._thread.join()
        for socket in (self._wake_in, self._wake_out):
            socket.close()
        self._hub.close()
        self._context.term()
        self._profiles.close()

    # ---- beyond Client

    def adopt(self, scheme: Scheme, profile: str | None = None) -> None:
        """From the next hand-over on follow this scheme and importance profile (a file; None: the one in use), without
        a pause. Raises ConfigError, and all goes on as before, when the profile can not take the place of the one in
        use. What becomes of the file afterwards does not matter."""
        if profile is not None:
            profile = self._profiles.replace(Path(profile))
        with self._lock:
            self._adopted = Adopt(scheme, profile)
            for name, worker in self._workers.items():
                if worker.role is Role.PREFILL and worker.ready:
                    self._coordinator.outbox.append((name, self._adopted))
            self._wake()

    def reload(self) -> None:
        """Read the importance profile's file again, as after `narrows profile importance`. What is wrong with it is
        logged, and the one in use stays."""
        if self._source is None:
            _log.warning("there is no importance profile to be read again, since nothing is selected (select)")
            return
        try:
            self.adopt(self._config.scheme, self._source)
        except ConfigError as error:
            _log.error("the hand-over stays as it is: %s", error)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every instance has started. Raises StartFailed with an instance's own words, or Unavailable."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.failure or self._closing or all(w.ready for w in self._workers.values()), timeout_s
            )
            if self.failure:
                raise StartFailed(self.failure)
            if not done or self._closing:
                late = ", ".join(name for name, worker in self._workers.items() if not worker.ready)
                raise Unavailable(f"not ready after {timeout_s:.0f} s: {late}")

    def pids(self) -> dict[InstanceId, int]:
        """Process ids of the instances, for tests and for people who debug."""
        with self._lock:
            return {name: worker.process.pid for name, worker in self._workers.items()}

    # ---- the driving thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._hub.socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while True:
            poller.poll(TURN_MS)
            with self._lock:
                try:
                    self._turn()
                except Exception as error:  # a bug: every caller must hear of it, and none may wait for ever
                    _log.exception("the cluster's thread failed")
                    self._fail(f"the coordinator failed: {error}")
                if self._closing or self.failure:
                    break
        for name in self._workers:
            self._hub.send(name, Shutdown())
        self._launcher.stop(list(self._workers.values()), CLOSE_TIMEOUT_S)
        if self._config.trace is not None:
            self._receive()  # the ends of the timelines
            write_chrome_trace(Path(self._config.trace), self._spans)

    def _turn(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._wake_out.recv(zmq.NOBLOCK)
        self._receive()
        now_s = self._clock.now()
        if now_s - self._looked_s >= TURN_MS / 1000:
            self._look_after_workers(now_s)
        while self._coordinator.outbox:
            self._hub.send(*self._coordinator.outbox.popleft())

    def _fail(self, reason: str) -> None:
        """Nothing can be served any more: say so to everybody, once."""
        _log.error("%s", reason)
        self.failure = reason
        self._coordinator.fail_all(reason, self._clock.now())
        self._changed.notify_all()

    def _receive(self) -> None:
        for name, message in self._hub.receive():
            worker, now_s = self._workers[name], self._clock.now()
            worker.heard_s = now_s
            if isinstance(message, Refused):
                worker.error = message.error
                worker.process.terminate()  # if it does not end by itself
            elif isinstance(message, Traced):
                self._spans[name].extend(message.spans)
            elif isinstance(message, Ready):
                worker.ready = True
                if self._adopted is not None and worker.role is Role.PREFILL:
                    self._coordinator.outbox.append((name, self._adopted))
                _log.info("%s is ready, process %d", name, worker.process.pid)
                self._changed.notify_all()
            self._coordinator.receive(name, message, now_s)

    def _look_after_workers(self, now_s: float) -> None:
        away_s = now_s - self._looked_s - TURN_MS / 1000
        self._looked_s = now_s
        for worker in list(self._workers.values()):
            if away_s > 1.0:  # this thread could not listen: stopped, or starved
                worker.heard_s += away_s
            code = worker.process.poll()
            if code is None and worker.ready and now_s - worker.heard_s > self._config.silence_s:
                worker.process.kill()
                worker.process.wait()
                self._lost(worker, f"silent for {self._config.silence_s:.0f} s, killed")
            elif code is not None and not self._closing:
                self._lost(worker, worker.error or f"process ended with code {code}")

    def _lost(self, worker: Worker, reason: str) -> None:
        """A worker's process is gone for sure. Start it again, unless it never was ready at all, or too often."""
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        now_s = self._clock.now()
        self._hub.expect(worker.name, None)
        if (member := self._coordinator.members().get(worker.name)) is not None:
            self._exporter.forget(member.info)
        self._coordinator.instance_lost(worker.name, reason, now_s)
        never_ready = not worker.ready and not self._restarts[worker.name]
        recent = [at for at in self._restarts[worker.name] if now_s - at < RESTART_WINDOW_S]
        if not never_ready and len(recent) < self._config.max_restarts:
            _log.warning("%s was lost (%s); starting it again", worker.name, reason)
            self._restarts[worker.name] = [*recent, now_s]
            self._exporter.count_restart(worker.name, worker.role)
            self._launch(worker.name, worker.role)
            return
        del self._workers[worker.name]
        if never_ready or not any(w.role is worker.role for w in self._workers.values()):
            self._fail(f"{worker.name} can not serve: {reason}")
        else:
            _log.error("%s was lost (%s) and is not started again: %d times", worker.name, reason, len(recent))

    def _launch(self, name: InstanceId, role: Role) -> None:
        worker = self._launcher.start(name, role, self._clock.now())
        self._workers[name] = worker
        self._hub.expect(name, worker.incarnation)

    def _wake(self) -> None:
        # Under the lock, so one thread at a time. The thread that reads needs the lock: never wait for it here.
        with contextlib.suppress(zmq.Again):
            self._wake_in.send(b"", zmq.NOBLOCK)

    def _observe(self, event: Event) -> None:
        for observer in self._observers:
            _guarded(observer, event)


def _guarded(listener: Callable[[T], None], news: T) -> None:
    """A listener that fails must not take the cluster with it."""
    try:
        listener(news)
    except Exception:
        _log.exception("a listener failed at %s", type(news).__name__)
