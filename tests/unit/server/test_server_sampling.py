import pytest
from pydantic import ValidationError

from kvtier.engine.params import SamplingParams
from kvtier.engine.sparse import Sparse
from kvtier.hints import RequestHints
from kvtier.server.errors import ApiError, from_validation
from kvtier.server.protocol import ChatBody, CompletionBody, KvHints
from kvtier.server.sampling import chat_params, completion_params, request_hints

ASK = [{"role": "user", "content": "hi"}]


def completion(**body):
    return completion_params(CompletionBody(prompt="x", **body))


def chat(**body):
    return chat_params(ChatBody(messages=ASK, **body))


def test_defaults_are_openais():
    assert completion() == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat() == SamplingParams(max_tokens=None, temperature=1.0)


def test_everything_that_is_said_arrives():
    same = {
        "n": 3,
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "priority": -1,
        "ttft_target": 0.5,
        "tpot_target": 0.125,
        "speculate": False,
        "accept_lossy": True,
        "cache_salt": "ours",
    }
    said = {"stop": "a", "stop_token_ids": [3, 4, 3], "logit_bias": {"5": -1}, "sparse": {"kind": "quest", "sink": 2}}
    meant = {"stop": ("a",), "stop_token_ids": {3, 4}, "logit_bias": {5: -1.0}, "sparse": Sparse("quest", sink=2)}
    said, expected = {**same, **said}, {**same, **meant}
    assert completion(max_tokens=9, logprobs=2, **said) == SamplingParams(max_tokens=9, logprobs=2, **expected)
    assert chat(max_completion_tokens=9, logprobs=True, top_logprobs=4, **said) == SamplingParams(
        max_tokens=9, logprobs=4, **expected
    )


def test_null_is_as_good_as_nothing():
    names = (set(CompletionBody.model_fields) & set(ChatBody.model_fields)) - {"prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(("said", "meant"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_seeds_may_be_negative(said, meant):
    assert completion(seed=said).seed == chat(seed=said).seed == meant


def test_a_beam_search_draws_nothing():
    assert completion(beam_width=3, n=2, length_penalty=0.5) == SamplingParams(
        max_tokens=16, beam_width=3, n=2, length_penalty=0.5
    )


def test_what_costs_more_than_it_shows():
    assert completion(echo=True, max_tokens=0).max_tokens == 1
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(logprobs=3).prompt_logprobs is None
    best = completion(n=2, best_of=4)
    assert (best.n, best.logprobs) == (4, 0)
    assert completion(n=2, best_of=2).logprobs is None
    assert chat(logprobs=True).logprobs == 0


@pytest.mark.parametrize(
    ("make", "body", "param"),
    [
        (completion, {"top_p": 0}, "top_p"),
        (completion, {"temperature": -1}, "temperature"),
        (completion, {"temperature": float("nan")}, "temperature"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"best_of": 1, "n": 2}, "best_of"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"best_of": 2, "beam_width": 2}, "best_of"),
        (completion, {"beam_width": 2, "temperature": 1.0}, "temperature"),
        (completion, {"beam_width": 2, "n": 3}, "n"),
        (completion, {"stop": ""}, "stop"),
        (completion, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (completion, {"logit_bias": {"a": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"1_0": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"\u0661": 1}}, "logit_bias"),
        (completion, {"logit_bias": {" 1": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"+1": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"01": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (completion, {"logit_bias": {"1": 101}}, "logit_bias"),
        (completion, {"stream_options": {"include_usage": True}}, "stream_options"),
        (completion, {"sparse": {"kind": "quest", "share": 0.0}}, "sparse"),
        (chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (chat, {"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_a_refusal_names_its_parameter(make, body, param):
    with pytest.raises(ApiError) as caught:
        make(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": []}, "prompt", "expected a text"),
        ({"prompt": None}, "prompt", "expected a text"),
        ({"prompt": ["a", [1]]}, "prompt", "expected a text"),
        ({"prompt": [1, True]}, "prompt", "expected a text"),
        ({"prompt": [1.0]}, "prompt", "expected a text"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"seed": 2**64}, "seed", "less than or equal to 18446744073709551615"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop", "at most 16"),
        ({"stop": "x" * 257}, "stop", "256 characters"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids", "at most 1024"),
        ({"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
        ({"frequency_penalty": 1e39}, "frequency_penalty", "less than or equal to 2"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"length_penalty": 1e308}, "length_penalty", "less than or equal to 10"),
        ({"tpot_target": 1e308}, "tpot_target", "less than or equal to 86400"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"top_K": 1}, "top_K", "unknown parameter"),
        ({"sparse": {"kind": "dense"}}, "sparse.kind", "'quest'"),
        ({"kv_hints": {"pin": True}}, "kv_hints.pin", "unknown parameter"),
        ({"kv_hints": {"reuse": "maybe"}}, "kv_hints.reuse", "'likely'"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ],
)
def test_a_body_of_the_wrong_shape_is_named(body, param, says):
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "x", **body})
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    refusal = from_validation(errors)
    assert refusal.status == 400
    assert refusal.param == param
    assert says in str(refusal)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["audio"]},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user"}]},
        {"messages": []},
    ],
)
def test_what_a_chat_cannot_do_is_refused(body):
    with pytest.raises(ValidationError):
        ChatBody.model_validate({"messages": ASK, **body})


def test_what_clients_write_without_meaning_is_taken():
    body = ChatBody.model_validate(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None},
                {"role": "assistant", "content": None},
            ],
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "user": "me",
            "metadata": {"a": "b"},
        }
    )
    assert [message.rendered() for message in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": ""},
    ]


def test_hints_arrive():
    said = {"priority": 4.0, "ttl": 60.0, "reuse": "likely", "dead_from_depth": 3, "session": "s"}
    assert request_hints(KvHints(**said, end_of_session=True)) == RequestHints(**said, end_of_session=True)
    assert request_hints(None) is None
    with pytest.raises(ApiError, match="name the session") as caught:
        request_hints(KvHints(end_of_session=True))
    assert caught.value.param == "kv_hints"
