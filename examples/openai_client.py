"""A conversation with `kvtier serve`, with OpenAI's own client: the second turn finds the first one's KV.

Exits with 1 where it does not.

kvtier serve &
python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

RULES = (
    "Harbour rules. Boats longer than twelve metres moor at the outer pier. Visitors register at the office before "
    "noon. Fires are allowed on the east beach only. The crane is free on weekdays between eight and ten. "
) * 2
QUESTIONS = ["Where do long boats moor?", "When is the crane free?"]


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=url, api_key="unused")
    model = client.models.list().data[0].id
    messages, cached = [{"role": "system", "content": RULES}], 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            # kvtier's own: what is known of this KV's future.
            extra_body={"kv_hints": {"session": "harbour", "reuse": "likely"}},
        )
        answer = ""
        for chunk in stream:
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            if chunk.usage:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n  ({cached} of {chunk.usage.prompt_tokens} prompt tokens were in the cache)")
        messages.append({"role": "assistant", "content": answer})
    return 0 if cached else 1


if __name__ == "__main__":
    sys.exit(main())
