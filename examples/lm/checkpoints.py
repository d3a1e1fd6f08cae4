"""Checkpoints of a training run, kept by Orbax.

A batch is a pure function of seed and step, so parameters, optimizer state and the history, whose length is the step,
are all that a resumed run needs to go on bit for bit.
"""

import dataclasses
from pathlib import Path

import optax
import orbax.checkpoint as ocp

from spectra_optax import check_stored_state, checkpoint_contents

from .settings import require_same
from .steps import TrainState
from .training import History


class RunCheckpoints:
    """Checkpoints of one run in one folder, with the settings that they belong to.

    Attributes:
      folder: Where they lie.
      settings: Settings of the run.
      every: Steps between two checkpoints.
      last: Step after which the run is finished, always saved.
    """

    def __init__(self, folder: Path, settings: dict, *, every: int, last: int):
        if every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {every}")
        self.folder, self.settings, self.every, self.last = folder.resolve(), settings, every, last
        # Not in the background, so that what `save` returned from survives whatever ends the process.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        items = ("state", "history", "settings")
        self._manager = ocp.CheckpointManager(self.folder, item_names=items, options=options)

    @property
    def step(self) -> int | None:
        """The newest checkpoint's number of steps done, or `None` if there is no checkpoint."""
        return self._manager.latest_step()

    def require_same_settings(self) -> None:
        """Refuses to go on from checkpoints of other settings, by a `ValueError` that names what differs."""
        if self.step is not None:
            found = self._manager.restore(self.step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))
            require_same(self.settings, found.settings, self.folder)

    def clear(self) -> None:
        """Deletes every checkpoint, so that the run starts afresh."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def restore(self, tx: optax.GradientTransformation, state: TrainState) -> tuple[TrainState, History]:
        """The newest checkpoint, laid out as `state` is, or `state` and an empty history if there is none."""
        if self.step is None:
            return state, History()
        stored = checkpoint_contents(self.folder / str(self.step) / "state")
        check_stored_state(tx, state.params, stored["optimizer"])
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state), history=ocp.args.JsonRestore())
        restored = self._manager.restore(self.step, args=args)
        return restored.state, History(**restored.history)

    def save(self, state: TrainState, history: History) -> None:
        """Saves every so many steps and after the last one."""
        step = len(history.losses)
        if step % self.every and step != self.last:
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            history=ocp.args.JsonSave(dataclasses.asdict(history)),
            settings=ocp.args.JsonSave(self.settings),
        )
        self._manager.save(step, args=args)
