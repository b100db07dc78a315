"""The state of a run on disk, with Orbax, so that an interrupted one goes on."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from step import State


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
      stage: The stage under way.
      steps: Steps taken in every stage.
      seconds: Time trained.
    """

    stage: int
    steps: tuple[int, ...]
    seconds: float

    @classmethod
    def start(cls, num_stages: int) -> "Position":
        """Before the first step."""
        return cls(0, (0,) * num_stages, 0.0)

    def after(self, stage: int, step: int, seconds: float) -> "Position":
        """With `step` steps of a stage done."""
        steps = (*self.steps[:stage], step, *self.steps[stage + 1 :])
        return Position(stage, steps, seconds)


class Checkpoints:
    """The newest state of one run, written in the background."""

    def __init__(
        self, directory: Path, run: Mapping[str, Any] | None = None, *, is_new: bool = False
    ) -> None:
        """Opens the folder, which may be empty.

        Args:
          directory: The folder.
          run: What tells this run from others, in types of JSON; it must be the same when the run
            goes on.
          is_new: Whether the run begins here. Beside the state of another run it could not be
            saved: Orbax keeps the one with more steps.

        Raises:
          ValueError: If a run is to begin where there is the state of one.
        """
        self.run = dict(run or {})
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self.manager = ocp.CheckpointManager(directory.absolute(), options=options)
        if is_new and self.manager.latest_step() is not None:
            raise ValueError(
                f"{directory} must be empty when a run begins, got the state of a run after "
                f"{self.manager.latest_step()} steps; pass --resume to go on with it, or another "
                f"--out"
            )

    def save(self, state: State, position: Position) -> None:
        """Saves; an older one is deleted once this one is complete."""
        self.manager.save(
            sum(position.steps),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                position=ocp.args.JsonSave({**dataclasses.asdict(position), "run": self.run}),
            ),
        )

    def restore(self, state: State, position: Position) -> tuple[State, Position]:
        """The newest state, in the structure of `state`.

        Raises:
          ValueError: If there is none, or it belongs to another run.
        """
        latest = self.manager.latest_step()
        if latest is None:
            raise ValueError(f"{self.manager.directory} must hold a run to resume, got none")
        restored = self.manager.restore(
            latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(state), position=ocp.args.JsonRestore()
            ),
        )
        found = restored["position"]
        there = found.get("run", {})
        differing = [
            f"{name} {there.get(name)!r} there, {self.run.get(name)!r} now"
            for name in sorted({*there, *self.run})
            if there.get(name) != self.run.get(name)
        ]
        if differing:
            raise ValueError(f"the run to resume must be the same, got {'; '.join(differing)}")
        if len(found["steps"]) != len(position.steps):
            raise ValueError(
                f"the run to resume must have {len(position.steps)} stages, got "
                f"{len(found['steps'])}"
            )
        return State(*restored["state"]), Position(
            found["stage"], tuple(found["steps"]), found["seconds"]
        )

    def close(self) -> None:
        """Waits for what is still being written."""
        self.manager.wait_until_finished()
        self.manager.close()
