"""Instances as processes of this machine."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import msgspec

from narrows.config import EngineConfig
from narrows.core.ids import InstanceId, Role
from narrows.runtime.client import ServedModel
from narrows.runtime.files import ProfileFiles

# How long an OpenMP thread spins before it sleeps. By default it spins for milliseconds, and two instances that
# compute at once on the same cores then wait out each other's time slices at every barrier; too short, and every
# barrier costs a sleep.
SPIN_COUNT = {"GOMP_SPINCOUNT": "1000"}
DECISIONS = logging.getLogger("narrows.transfer")  # whoever wants instances to log their decisions enables it
PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Worker:
    """One process and what is known of its life. `heard_s` is when it last spoke."""

    name: InstanceId
    role: Role
    incarnation: str
    process: "subprocess.Popen[bytes]"
    heard_s: float
    ready: bool = False
    error: str = ""  # why it refused to start or go on


@dataclass(slots=True)
class Launcher:
    """Starts and ends worker processes. None outlives this process, not even when it is killed."""

    config: EngineConfig
    model: ServedModel
    hub: str
    files: ProfileFiles = field(default_factory=ProfileFiles)
    secret: str = field(default_factory=lambda: uuid4().hex)

    def start(self, name: InstanceId, role: Role, now_s: float) -> Worker:
        incarnation = uuid4().hex
        spec = {
            "config": self.config,
            "folder": self.model.folder,
            "role": role,
            "name": name,
            "incarnation": incarnation,
            "hub": self.hub,
            "transport": self.config.transport_kind,
            "secret": self.secret,
            "files": self.files,
            "verbose": DECISIONS.isEnabledFor(logging.INFO),
        }
        paths = [str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "narrows.runtime.worker"],
            stdin=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for the parent, which ends its workers in order
            env={**SPIN_COUNT, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
        return Worker(name, role, incarnation, process, now_s)

    @staticmethod
    def stop(workers: list[Worker], timeout_s: float = 5.0) -> None:
        """Wait for processes that were told to shut down; kill those that do not within the time."""
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            if worker.process.stdin is not None:
                worker.process.stdin.close()
