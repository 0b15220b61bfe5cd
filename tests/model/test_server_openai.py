"""The server on the real model, with OpenAI's own client."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from server_world import RunningServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier import AsyncLLM

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
FACTS = "Boats longer than twelve metres moor at the outer pier. Visitors register at the office before noon. " * 3
QUESTION = [{"role": "user", "content": FACTS + "Where do long boats moor?"}]
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[RunningServer]:
    config = {"model": {"dtype": "float32"}}
    running = RunningServer(AsyncLLM(default_model, config=config, memory="128MiB"), MODEL)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def reference(default_model: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)


def scores(reference: AutoModelForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities float32 [T - 1, vocab] of each token after the first."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvtier"


def test_completion_and_logprobs_are_those_of_transformers(
    default_model: Path, client: openai.OpenAI, reference: AutoModelForCausalLM
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    said = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=3, echo=True, **GREEDY)
    (choice,) = said.choices
    assert choice.text.startswith(PROMPT + " Paris.")
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    tokens = tokenizer(choice.text).input_ids
    assert logprobs.tokens == [tokenizer.decode([token]) for token in tokens]
    assert logprobs.text_offset == [len(tokenizer.decode(tokens[:at])) for at in range(len(tokens))]
    rows = scores(reference, tokens)
    assert rows[-8:].argmax(-1).tolist() == tokens[-8:]
    chosen = rows.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(chosen.tolist(), abs=2e-3)
    for told, row in zip(logprobs.top_logprobs[1:], rows, strict=True):
        values, ids = row.topk(3)
        best = {tokenizer.decode([token]): value for token, value in zip(ids.tolist(), values.tolist(), strict=True)}
        assert {text: told[text] for text in best} == pytest.approx(best, abs=2e-3)
        assert len(told) <= 4


def test_chat_streams_what_it_says_and_finds_its_prefix_again(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "max_completion_tokens": 8, **GREEDY}
    cold = client.chat.completions.create(**ask)
    warm = client.chat.completions.create(**ask, logprobs=True, top_logprobs=1)
    (choice,) = warm.choices
    assert choice.message.content
    assert choice.message == cold.choices[0].message
    assert (cold.usage.prompt_tokens, cold.usage.prompt_tokens_details.cached_tokens) == (warm.usage.prompt_tokens, 0)
    found = warm.usage.prompt_tokens_details.cached_tokens
    assert found == (warm.usage.prompt_tokens - 1) // 16 * 16 > 0
    # Greedy: the likeliest token is the one that was taken.
    for entry in choice.logprobs.content:
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    assert len(choice.logprobs.content) == warm.usage.completion_tokens
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [choice.finish_reason]
    assert last.choices == []
    assert last.usage == client.chat.completions.create(**ask).usage


def test_a_stop_string_may_lie_across_tokens(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 10, **GREEDY}
    text = client.completions.create(**ask).choices[0].text
    assert text.startswith(" five, six")
    stopped = client.completions.create(**ask, stop=["nothing", "e, s"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" fiv", "stop")
    parts = list(client.completions.create(**ask, stop="e, s", stream=True))
    assert "".join(part.choices[0].text for part in parts) == " fiv"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_n_samples_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 7, "temperature": 1.2, "max_tokens": 5}
    first = client.chat.completions.create(**ask)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    # The same draws, whatever else is computed at the same time.
    with ThreadPoolExecutor(2) as pool:
        noise = pool.submit(client.completions.create, model=MODEL, prompt=PROMPT, max_tokens=8, n=2)
        again = client.chat.completions.create(**ask)
        noise.result()
    assert [choice.message.content for choice in again.choices] == texts
    assert again.usage.completion_tokens == first.usage.completion_tokens


def test_sixteen_at_once_say_what_each_says_alone(client: openai.OpenAI) -> None:
    prompts = [f"{number} plus {number} is" for number in range(16)]

    def say(prompt: str) -> str:
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, **GREEDY).choices[0].text

    alone = [say(prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(say, prompts)) == alone


def test_a_client_that_leaves_frees_its_blocks(server: RunningServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert server.llm.stats().running == 1
    stream.close()
    server.at_rest()


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": QUESTION}
    with pytest.raises(openai.NotFoundError, match="this server has") as missing:
        client.chat.completions.create(**{**ask, "model": "gpt-4"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"top_p=1\.5") as wrong:
        client.chat.completions.create(**ask, top_p=1.5)
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="tools: not supported"):
        client.chat.completions.create(**ask, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"


def test_the_command_serves_and_ends_on_a_signal(default_model: Path, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    start = "import sys; from kvtier.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "serve", str(default_model), "--port", "0"]
    command += ["--api-key", "a-secret", "--served-model-name", "small"]
    environ |= {"HOME": str(tmp_path), "KVTIER_LOG__FORMAT": "json", "KVTIER_ENGINE__NUM_BLOCKS": "32"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path) as process:
        try:
            lines = [process.stderr.readline()]
            url = re.search(r'"url": "([^"]+)"', lines[0]).group(1)
            with openai.OpenAI(base_url=url, api_key="a-secret", max_retries=0) as client:
                assert client.completions.create(model="small", prompt=PROMPT, max_tokens=2, **GREEDY).choices[0].text
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="another").models.list()
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.read().splitlines()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert len(lines) == 4, lines
    assert '"message": "draining"' in lines[-1]
    assert "a-secret" not in "".join(lines)
