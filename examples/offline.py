"""Answer a batch of prompts without a server. Run: python examples/offline.py"""

from narrows import LLM, SamplingParams


def main() -> None:
    prompts = [f"The capital of {country} is" for country in ("France", "Japan", "Kenya", "Peru")]
    with LLM("smollm2-135m", prefill=1, decode=1) as llm:
        for prompt, answer in zip(
            prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)), strict=True
        ):
            print(f"{prompt!r} -> {answer.text!r} ({answer.finish_reason})")
        print(
            llm.chat([{"role": "user", "content": "What is a KV cache?"}], SamplingParams(max_tokens=60, seed=1)).text
        )


if __name__ == "__main__":
    main()
