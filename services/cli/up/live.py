"""The live view of a run: a table that redraws itself in a terminal, one line a step elsewhere."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from trivet.v1 import trainer_pb2

from services.cli.shared.output import say
from services.cli.up.observation import Observation
from services.cli.up.report import doubts
from services.common.run_files.run_log import before_updates

COLUMNS = 3
UNKNOWN = "–"


class View:
    def __init__(self, console: Console, run: str) -> None:
        self._console, self._run = console, run
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_interactive else None
        self._printed, self._awaited = -1, ""

    def __enter__(self) -> "View":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, seen: Observation) -> None:
        if self._live is not None:
            self._live.update(panel(self._run, seen))
        elif seen.trainer is None or not seen.trainer.metrics:
            if (awaited := awaited_line(seen)) != self._awaited:
                self._awaited = awaited
                say(self._console, awaited)
        elif seen.trainer.step != self._printed:
            self._printed = seen.trainer.step
            say(self._console, line(seen.trainer))


def awaited_line(seen: Observation) -> str:
    """What happens before the first step, which may take minutes."""
    state = "starting" if seen.trainer is None else _state(seen.trainer)
    # A run that learns from pairs of a file has neither queues nor rollouts.
    if seen.trainer is None or seen.rollouts or not seen.depths:
        return f"the trainer is {state} …"
    return f"the trainer is {state}; no rollout answers yet …"


def _state(trainer: trainer_pb2.TrainerServiceGetStatusResponse) -> str:
    return trainer_pb2.TrainerState.Name(trainer.state).removeprefix("TRAINER_STATE_").lower()


def line(trainer: trainer_pb2.TrainerServiceGetStatusResponse) -> str:
    step, held_out = before_updates(trainer.metrics), trainer.evaluation
    if "preference_accuracy" in held_out:
        return (
            f"step {trainer.step:>4}/{trainer.steps}  loss {_number(step, 'loss')}  "
            f"margin {_number(step, 'preference_margin')}  "
            f"held-out pairs {_number(held_out, 'preference_accuracy')}  "
            f"gradient {_number(step, 'grad_norm')}  {step['tokens_per_second']:.0f} tokens/s"
        )
    return (
        f"step {trainer.step:>4}/{trainer.steps}  reward {_number(step, 'reward_mean')}  "
        f"held-out greedy {_number(held_out, 'greedy_accuracy')} sampled {_number(held_out, 'sampled_accuracy')}  "
        f"kl {_number(step, 'kl', 4)}  ratio {_number(step, 'sampler_ratio_mean', 4)}  "
        f"routing {_number(step, 'routing_agreement', 4)}  masked {_number(step, 'masked_fraction')}  "
        f"{step['tokens_per_second']:.0f} tokens/s" + "".join(f"\n  {doubt}" for doubt in doubts(step))
    )


def panel(run: str, seen: Observation) -> RenderableType:
    trainer = seen.trainer
    if trainer is None:
        return Text.assemble((run, "bold"), ": the trainer is starting …")
    minutes, seconds = divmod(round(trainer.eta_seconds), 60)
    table = Table(
        title=f"{run}: {_state(trainer)}", title_justify="left", show_header=False, box=None, padding=(0, 3, 0, 0)
    )
    for _ in range(COLUMNS):
        table.add_column(justify="left", style="cyan", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    cells = _pair_cells(trainer) if "preference_accuracy" in trainer.evaluation else _sample_cells(seen, trainer)
    cells = [
        ("step", f"{trainer.step} / {trainer.steps}"),
        ("checkpoint", str(trainer.checkpoint_step)),
        ("ETA", f"{minutes}:{seconds:02}"),
        *cells,
    ]
    for first in range(0, len(cells), COLUMNS):
        table.add_row(*(text for cell in cells[first : first + COLUMNS] for text in cell))
    bar = ProgressBar(total=max(1, trainer.steps), completed=trainer.step, width=100)
    return Group(table, *(Text(doubt, style="yellow") for doubt in doubts(trainer.metrics)), bar)


def _sample_cells(seen: Observation, trainer: trainer_pb2.TrainerServiceGetStatusResponse) -> list[tuple[str, str]]:
    step, held_out = before_updates(trainer.metrics), trainer.evaluation
    versions = " ".join(str(rollout.version) for rollout in seen.rollouts.values()) or UNKNOWN
    sampling = sum(rollout.tokens_per_second for rollout in seen.rollouts.values())
    return [
        ("reward", _number(step, "reward_mean")),
        ("held-out greedy", _number(held_out, "greedy_accuracy")),
        ("held-out sampled", _number(held_out, "sampled_accuracy")),
        ("length", _number(step, "length_mean", 1)),
        ("KL to reference", _number(step, "kl", 5)),
        ("sampler/trainer ratio", _number(step, "sampler_ratio_mean", 5)),
        ("masked sequences", _number(step, "masked_fraction")),
        ("routing agreement", _number(step, "routing_agreement", 4)),
        ("mismatch KL", _number(step, "mismatch_kl", 6)),
        ("versions", f"trainer {trainer.version}, rollout {versions}"),
        ("staleness", _number(step, "staleness_mean", 2)),
        ("tokens/s", f"train {step.get('tokens_per_second', 0):.0f}, sample {sampling:.0f}"),
        ("queues", " · ".join(f"{name} {depth}" for name, depth in seen.depths.items()) or UNKNOWN),
        ("groups in flight", str(trainer.groups_in_flight)),
        ("gradient norm", _number(step, "grad_norm")),
    ]


def _pair_cells(trainer: trainer_pb2.TrainerServiceGetStatusResponse) -> list[tuple[str, str]]:
    step, held_out = before_updates(trainer.metrics), trainer.evaluation
    return [
        ("loss", _number(step, "loss")),
        ("held-out pairs", _number(held_out, "preference_accuracy")),
        ("held-out margin", _number(held_out, "preference_margin")),
        ("margin", _number(step, "preference_margin")),
        ("gradient norm", _number(step, "grad_norm")),
        ("tokens/s", f"{step.get('tokens_per_second', 0):.0f}"),
    ]


def _number(values: Mapping[str, float], name: str, digits: int = 3) -> str:
    return f"{values[name]:.{digits}f}" if name in values else UNKNOWN
