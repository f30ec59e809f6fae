"""Where an instance finds what was measured before serving."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from narrows.errors import ConfigError
from narrows.profile.importance import ImportanceProfile


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """What was measured for this model, selector and machine (narrows.profiles makes what is missing)."""

    model: str = ""  # fingerprint of the model folder
    calibration: str | None = None
    importance: str | None = None
    timing: str | None = None


class Snapshots:
    """Copies of importance profiles that instances follow, in a folder of their own: a file may change, or be damaged,
    while an instance that was lost starts again."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="narrows-profiles-", ignore_cleanup_errors=True)
        self._current: ImportanceProfile | None = None
        self._count = 0

    def replace(self, file: Path) -> str:
        """The path of a copy of this profile. Raises ConfigError, keeping the current one, when it is damaged or for
        another model or selector than that."""
        now = self._current
        copy = Path(self._folder.name) / f"{self._count}.safetensors"
        try:
            shutil.copyfile(file, copy)
        except OSError as error:
            raise ConfigError(f"profile: {file} can not be read: {error.strerror or error}") from error
        try:
            self._current = ImportanceProfile.load(
                copy, model=None if now is None else now.model, selector=None if now is None else now.selector
            )
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(copy), str(file))) from error
        self._count += 1
        return str(copy)

    def close(self) -> None:
        self._folder.cleanup()
