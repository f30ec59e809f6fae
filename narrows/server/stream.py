"""Tokens to text while they arrive: whole characters only, cut at stop strings, the same for any grouping of tokens.

tokens -> Detokenizer -> certain text -> StopScanner -> text for the client
            holds back what a later         holds back what may be the
            token could still change        beginning of a stop string
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrows.core.request import FinishReason, SampledToken, SamplingParams
from narrows.runtime.client import Output

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNCERTAIN = 3  # an unfinished UTF-8 character has at most three bytes
_LONG_WINDOW = 64  # tokens; beyond this a window is shortened so that each push stays cheap

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns tokens into text one at a time; all pieces joined are `decode` of all tokens.

    Only a window of the newest tokens is decoded again at each push:

        window = [context ...][new ...]     context: already emitted, kept because some decoders treat the
                                            first token of a sequence differently
        decode(window) = text[:done] emitted | text[done:certain] now | the rest held back

    The one departure: in a tokenizer with byte fallback, an invalid byte makes `decode` replace the whole run of bytes
    around it, where valid characters that were emitted before stay emitted.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0  # tokens
        self._context = ""  # decode(context)
        self._done = 0  # characters of decode(window)

    def push(self, token: int) -> str:
        """The text that has become certain with this token, often empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._context):
            del self._window[: self._num_context]
            self._set_context(0)
            text = self._decode(self._window)
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        certain = len(text) - min(trailing, _MAX_UNCERTAIN)
        piece = text[self._done : certain]
        self._done = max(self._done, certain)
        if piece and certain == len(text):
            del self._window[: self._num_context]
            self._set_context(len(self._window))
        elif len(self._window) % _LONG_WINDOW == 0:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """What was held back: nothing can change it any more."""
        return self._decode(self._window)[self._done :]

    def _set_context(self, num_tokens: int) -> None:
        self._num_context = num_tokens
        self._context = self._decode(self._window[:num_tokens])
        self._done = len(self._context)

    def _shorten(self, text: str) -> None:
        """Drop the tokens of a window that are settled: without text, or invalid bytes already emitted."""
        if text == self._context:
            del self._window[self._num_context :]
            return
        for cut in range(len(self._window) - 1, self._num_context, -1):
            head = self._decode(self._window[:cut])
            # A cut through a character would decode to more replacement characters than the whole.
            if len(head) <= self._done and head + self._decode(self._window[cut:]) == text:
                done = self._done - len(head)
                del self._window[:cut]
                self._set_context(0)
                self._done = done
                return


class StopScanner:
    """Cuts a text at the first stop string that is completed, however the text is divided into pieces.

    Of two that are completed by the same character the longer one counts. `include` keeps the stop string itself.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was found)."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held = ""
            return text[: end if self._include else start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself excluded."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where it stands: `offset` characters of the uncut text were certain before it."""

    token: SampledToken
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output adds for the client. After a finish_reason nothing more comes."""

    text: str
    tokens: tuple[PlacedToken, ...] = ()
    finish_reason: FinishReason | None = None


class TextStream:
    """One request's outputs as text.

    Stop strings count from the text of the token after the first `min_tokens` on. Tokens past a stop string are
    dropped; the caller must then abort the request, which does not know of it.
    """

    def __init__(self, decode: Decode, params: SamplingParams, include_stop: bool = False) -> None:
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(params.stop, include_stop)
        self._min_tokens = params.min_tokens
        self._length = 0  # characters of certain text
        self.num_tokens = 0

    def push(self, output: Output) -> Piece:
        shown: list[str] = []
        placed: list[PlacedToken] = []
        for token in output.tokens:
            placed.append(PlacedToken(token, self._length))
            self.num_tokens += 1
            if self._take(self._detokenizer.push(token.id), shown):
                return Piece("".join(shown), tuple(placed), FinishReason.STOP)
        reason = output.finish_reason
        if reason is not None:
            if self._take(self._detokenizer.finish(), shown):
                reason = FinishReason.STOP
            shown.append(self._scanner.finish())
        return Piece("".join(shown), tuple(placed), reason)

    def _take(self, text: str, shown: list[str]) -> bool:
        """Move `text` on, through the scanner unless it is too early; whether a stop string was found."""
        self._length += len(text)
        if self.num_tokens <= self._min_tokens:
            shown.append(text)
            return False
        text, stopped = self._scanner.push(text)
        shown.append(text)
        return stopped
