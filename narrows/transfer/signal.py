"""A descriptor that is readable while something waits, set by one thread and cleared by another."""

import contextlib
import os


class Signal:
    """A pipe with at most a few bytes in it. The one who clears must clear first and then look at what waits."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._is_set = False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            try:
                os.write(self._write, b"\0")
            except BlockingIOError:
                return  # full, so readable as it should be

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was not set
            os.read(self._read, 4096)
        # only after the read: a set() in between writes nothing, but its cause is seen by the look that follows
        self._is_set = False

    def close(self) -> None:
        """Both ends; call when no thread sets it any more."""
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1
        self._is_set = True  # a late set() does nothing
