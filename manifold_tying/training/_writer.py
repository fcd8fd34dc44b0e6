"""The thread that writes a run's checkpoints while training continues."""

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
    """Writes checkpoints to ``RUN/checkpoints``, one at a time. Leaving its ``with`` block waits for the last one.

    Every rank has one and calls it at the same steps. The threads use a process group of their own, since collectives of
    one group must come in the same order on all ranks.

    Args:
        run: the run's folder.
        processes: the run's ranks.
        timeout: seconds that a thread waits for those of other ranks.
        keep: how many of the newest checkpoints to keep; None keeps all.
    """

    def __init__(self, run: Path, processes: Processes, timeout: float, keep: int | None) -> None:
        self._run = run
        self._keep = keep
        self._processes = processes.with_own_group(timeout)
        # A new thread starts on CUDA device 0.
        prepare = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=prepare)
        self._newest: Future[Path] | None = None

    def write(self, stage: Callable[[], Staged]) -> None:
        """Copy the state by ``stage()`` and start to write it.

        First waits for the previous checkpoint and raises its error, so that one copy exists at a time.
        """
        self.wait()
        self._newest = self._thread.submit(write_checkpoint, self._run, stage(), self._processes, keep=self._keep)

    def wait(self) -> None:
        """Wait for the newest checkpoint; its ValueError or OSError is raised on all ranks."""
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.result()

    def kept(self) -> list[str]:
        """Names of the existing checkpoints, oldest first."""
        self.wait()
        return self._processes.from_main(lambda: [path.name for path in checkpoints(self._run)])

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"The newest checkpoint could not be written either: {failed}")
        finally:
            self._thread.shutdown()
        if error is None:
            self._processes.close()
