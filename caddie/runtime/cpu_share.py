"""Share of CPU time that a process gets, to detect a busy machine."""

import time

BUSY_SHARE = 0.75
"""Share of its threads' time below which a process is not alone; runs alone had 0.91 to 0.998 (`studies/`)."""


class CpuShare:
    """Measure which share of the time of its `threads` threads this process gets from here on."""

    def __init__(self, threads: int) -> None:
        self.threads, self._wall, self._busy = threads, time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._wall

    @property
    def share(self) -> float:
        """Share from 0 to 1; 1 if nothing else ran."""
        return min(1.0, (time.process_time() - self._busy) / (self.seconds * self.threads))
