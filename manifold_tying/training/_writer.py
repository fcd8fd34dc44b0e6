"""The thread that writes a run's checkpoints while its steps go on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from manifold_tying.training._checkpoint import checkpoints
from manifold_tying.training._processes import Processes
from manifold_tying.training._saving import Staged, write_checkpoint


class CheckpointWriter:
    """Writes one checkpoint after another to ``RUN/checkpoints``. Leaving its ``with`` waits for the last one.

    Each process of a run has one and calls it at the same steps. Their threads talk to each other in a group of their own:
    collectives of one group are matched by their order, and between those of training theirs would have none.

    Args:
        run: the folder of the run.
        processes: of the run; all of them make a writer.
        timeout: seconds that a thread waits for the others'.
        keep: how many of the newest checkpoints stay; None is all.
    """

    def __init__(self, run: Path, processes: Processes, timeout: float, keep: int | None) -> None:
        self._run = run
        self._keep = keep
        self._processes = processes.apart(timeout)
        # A new thread would work with the first CUDA device, whichever is this process's.
        prepare = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=prepare)
        self._newest: Future[Path] | None = None

    def write(self, stage: Callable[[], Staged]) -> None:
        """Copy the state by ``stage()`` and return; it is written while training goes on.

        Waits for the checkpoint before, so that there is one copy at a time, and raises its error; see :meth:`wait`.
        """
        self.wait()
        self._newest = self._thread.submit(write_checkpoint, self._run, stage(), self._processes, keep=self._keep)

    def wait(self) -> None:
        """Wait until the newest checkpoint is there. ValueError or OSError, on all processes, where it could not be written."""
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.result()

    def kept(self) -> list[str]:
        """Names of the checkpoints, oldest first, once the newest is written."""
        self.wait()
        return self._processes.first(lambda: [path.name for path in checkpoints(self._run)])

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"Beside this the newest checkpoint could not be written: {failed}")
        finally:
            self._thread.shutdown()
        if error is None:
            self._processes.leave()
