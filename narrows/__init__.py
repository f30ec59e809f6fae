"""Narrows: LLM serving for narrow networks and requests of very different lengths.

    from narrows import LLM, SamplingParams

`LLM` is loaded when it is first asked for, so that `import narrows` stays light.
"""

from typing import TYPE_CHECKING, Any

from narrows.core.request import SamplingParams

if TYPE_CHECKING:
    from narrows.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from narrows.llm import LLM

        return LLM
    raise AttributeError(f"module 'narrows' has no attribute {name!r}")
