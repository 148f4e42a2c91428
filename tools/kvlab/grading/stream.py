"""Standard output of a forked kernel: ipykernel's own, which does not wait for another thread when nothing was printed.

Called by `zygote`, through the kernel's `outstream_class`. ipykernel flushes four times for each request, and
waits for its thread each time: a third of what a short request takes. Never drops a character.
"""

from __future__ import annotations

from ipykernel.iostream import OutStream


class Stream(OutStream):
    """Sends what was printed, in order, as OutStream does."""

    def flush(self) -> None:
        """Waits until what waits is sent; what the thread has taken is sent before a reply."""
        with self._buffer_lock:
            if not self._buffers:
                return
        super().flush()
