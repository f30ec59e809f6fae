"""Stream a chat answer with the official client. Start `narrows serve` first; run: python examples/openai_client.py"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    (model,) = client.models.list()
    answer = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "Name three uses of a narrow sea passage."}],
        max_tokens=80,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in answer:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} answered")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
