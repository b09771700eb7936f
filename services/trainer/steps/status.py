"""What the trainer's main thread reports to the serving thread, and what it is asked to do."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from trivet.v1 import trainer_pb2

from services.common.transport.outages import Outages


@dataclass
class Status:
    """Written by the main thread, each value as a whole; read by the server's thread."""

    run: str
    steps: int
    state: trainer_pb2.TrainerState = trainer_pb2.TRAINER_STATE_STARTING
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    groups_issued: int = 0
    groups_trained: int = 0
    groups_in_flight: int = 0
    checkpoint_step: int = 0
    outages: Outages | None = None
    _started: float = field(default_factory=time.monotonic)
    _started_step: int = 0

    def start_clock(self, step: int) -> None:
        self._started, self._started_step, self.step = time.monotonic(), step, step

    @property
    def eta_seconds(self) -> float:
        done = self.step - self._started_step
        return (time.monotonic() - self._started) / done * (self.steps - self.step) if done else 0.0

    @property
    def not_ready(self) -> str | None:
        if self.state in (trainer_pb2.TRAINER_STATE_STARTING, trainer_pb2.TRAINER_STATE_FAILED):
            return trainer_pb2.TrainerState.Name(self.state)
        return self.outages.problem if self.outages else None

    def message(self) -> trainer_pb2.TrainerServiceGetStatusResponse:
        return trainer_pb2.TrainerServiceGetStatusResponse(
            run=self.run,
            state=self.state,
            step=self.step,
            steps=self.steps,
            version=self.step,
            metrics=self.metrics,
            evaluation=self.evaluation,
            groups_issued=self.groups_issued,
            groups_trained=self.groups_trained,
            groups_in_flight=self.groups_in_flight,
            checkpoint_step=self.checkpoint_step,
            eta_seconds=self.eta_seconds,
        )


class Controls:
    """What signals and callers ask for; the main thread looks between steps."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._paused = threading.Event()
        self._lock = threading.Lock()
        # The checkpoint that callers wait for: one for all of them.
        self._save: Future[trainer_pb2.Checkpoint] | None = None

    @property
    def paused(self) -> bool:
        return self._paused.is_set()

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def request_save(self) -> "Future[trainer_pb2.Checkpoint]":
        """The next checkpoint. If one caller cancels, the others still get it."""
        with self._lock:
            if self._save is None:
                self._save = Future()
                self._save.set_running_or_notify_cancel()
            return self._save

    @property
    def save_requested(self) -> bool:
        return self._save is not None

    def answer_saves(self, checkpoint: trainer_pb2.Checkpoint) -> None:
        with self._lock:
            save, self._save = self._save, None
        if save is not None:
            save.set_result(checkpoint)
