"""When a request ends by its tokens. Stop strings are found where text is known, in the server."""

from collections.abc import Sequence

from narrows.core.request import FinishReason, SamplingParams


def finish_reason(
    params: SamplingParams,
    output: Sequence[int],
    *,
    num_prompt: int,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> FinishReason | None:
    """Why the request ends with the last token of `output`, or None if it goes on.

    The last token counts as output even if it is the one that stops. An end or stop token among the first min_tokens
    does not stop (the sampler does not choose one there).
    """
    if not output:
        return None
    if len(output) > params.min_tokens:
        last = output[-1]
        if last in params.stop_token_ids or (not params.ignore_eos and last in eos_token_ids):
            return FinishReason.STOP
    longest = max_model_len - num_prompt
    if params.max_tokens is not None:
        longest = min(longest, params.max_tokens)
    return FinishReason.LENGTH if len(output) >= longest else None
