"""Where an instance finds what was measured before serving."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """What was measured for this model, selector and machine (narrows.profiles makes what is missing)."""

    model: str = ""  # fingerprint of the model folder
    calibration: str | None = None
    importance: str | None = None
    timing: str | None = None
