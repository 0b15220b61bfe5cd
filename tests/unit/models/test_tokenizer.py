"""Tokenizer on small trained vocabularies: GGUF round trips, templates, streaming."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvtier.engine.tokenizer import IncrementalDecoder, Tokenizer
from kvtier.errors import ModelError, RequestError

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 steps, I'll say; they've 56 more.",
    "naïve café — “quoted” text, emoji 🙂🚀 and 中文字符 mixed:",
    "def f(x):\n    return x + 1\n\n\n# comment\r\n\tindented",
]
NASTY = [
    *CORPUS,
    "",
    " ",
    "\n\n  \n",
    "a  1 22 333 4444 \uff15\uff16",
    "<|end|>x<|end|>",
    "<|im_start|>user <tool>",
    "\u0000\u200b\u202e\ufeff",
    "👩‍👩‍👧‍👦 e\u0301 ﷽",
    "I'M don'T WE'LL",
    "x" * 500,
]
SPECIALS = ["<|end|>", "<|im_start|>"]


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """As published: SmolLM2's and Llama 3's tokenizer.json, GPT-2's."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "llama-bpe":
        words = (
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
            "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        )
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), plain])
    return byte_level


def trained(name: str = "gpt-2") -> Backend:
    backend = Backend(models.BPE(ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens(["<tool>"])
    return backend


def metadata(backend: Backend, pre: str) -> dict[str, Any]:
    import json

    size = backend.get_vocab_size(with_added_tokens=True)
    tokens = [backend.id_to_token(index) for index in range(size)]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    kinds = [3 if token in SPECIALS else 4 if token == "<tool>" else 1 for token in tokens]
    prefix = "tokenizer.ggml."
    return {
        f"{prefix}model": "gpt2",
        f"{prefix}pre": pre,
        f"{prefix}tokens": tokens,
        f"{prefix}merges": merges,
        f"{prefix}token_type": kinds,
        f"{prefix}eos_token_id": 0,
        f"{prefix}eot_token_id": 1,
        f"{prefix}bos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "gpt-2", "default"])
def test_gguf_describes_the_tokenizer_it_was_made_from(pre: str) -> None:
    original = trained(pre)
    ours = Tokenizer.from_gguf(metadata(original, pre) | {"tokenizer.ggml.add_bos_token": False}, "x.gguf")
    for text in NASTY:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == original.decode(ids, skip_special_tokens=skip)
    assert ours.eos_ids == {0, 1}
    assert ours.bos_id == 1
    assert ours.vocab_size == original.get_vocab_size()


def test_gguf_bos_is_added_when_the_file_asks_for_it() -> None:
    described = metadata(trained(), "gpt-2")
    asked, llama3 = described | {"tokenizer.ggml.add_bos_token": True}, metadata(trained("llama-bpe"), "llama-bpe")
    for ours in (Tokenizer.from_gguf(asked, "x.gguf"), Tokenizer.from_gguf(llama3, "x.gguf")):
        assert ours.encode("dog") == [1, *ours.encode("dog", add_special_tokens=False)]
    assert 1 not in Tokenizer.from_gguf(described, "x.gguf").encode("dog")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "GGUF tokenizer 'llama': supported is gpt2"),
        ({"tokenizer.ggml.pre": "qwen2"}, "GGUF pre-tokenizer 'qwen2': supported are"),
        ({"tokenizer.ggml.merges": ["nowhere tobefound"]}, "damaged tokenizer"),
    ],
)
def test_unsupported_gguf_tokenizers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata(trained(), "gpt-2") | changes, "x.gguf")


def test_incomplete_gguf_tokenizer() -> None:
    described = metadata(trained(), "gpt-2")
    del described["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match=r"no tokenizer.ggml.merges"):
        Tokenizer.from_gguf(described, "x.gguf")


CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "naïve 🙂\n\n"},
    {"role": "assistant", "content": ""},
]
TEMPLATES = [
    "{% for m in messages %}\n  {{ m.role }}: {{ m.content | trim }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}go{% endif %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ eos_token }}{{ bos_token }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_transformers_renders_them(tmp_path: Path, template: str, prompt: bool) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=trained(), eos_token="<|end|>", bos_token="<|im_start|>")
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    expected = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(CONVERSATION, add_generation_prompt=prompt) == expected


def tokenizer(template: str | None = None) -> Tokenizer:
    return Tokenizer(trained(), {"eos_token": "<|end|>"}, frozenset({0}), template)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CONVERSATION, "no chat template"),
        ("x", [], "messages is empty"),
        ("x", [{"role": "user"}], r"messages\[0\] has \['role'\]: expected role and content"),
        ("{{ raise_exception('roles must alternate') }}", CONVERSATION, "refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}", CONVERSATION, "unsafe"),
        ("{% if", CONVERSATION, "refuses these messages"),
        ("{{ 1 + 'a' }}", CONVERSATION, "refuses these messages"),
    ],
)
def test_chat_errors_say_why(template: str | None, messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer(template).apply_chat_template(messages)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        tokenizer().encode("\ud800")


def test_template_in_tokenizer_config_and_special_tokens_map(tmp_path: Path) -> None:
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}, "eos_token": "x"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|end|>", "chat_template": '
        '[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
    ours = Tokenizer.from_directory(tmp_path)
    assert (ours.chat_template, ours.bos_id, ours.eos_ids) == ("d", 1, {0, 1})


SHARED = tokenizer()


@settings(max_examples=200)
@given(
    st.one_of(
        st.lists(st.integers(0, SHARED.vocab_size - 1), max_size=60),
        # Single bytes only: nearly always no UTF-8.
        st.lists(st.integers(2, 257), max_size=60),
        st.text(max_size=40).map(lambda text: SHARED.encode(text) if text.isprintable() else []),
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_pieces_join_to_the_whole_and_hold_no_broken_character(ids: list[int], step: int, skip: bool) -> None:
    decoder = IncrementalDecoder(SHARED, skip_special=skip)
    pieces = [decoder.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    pieces.append(decoder.flush())
    whole = SHARED.decode(ids, skip_special=skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


def test_characters_come_as_soon_as_they_are_complete() -> None:
    decoder = IncrementalDecoder(SHARED)
    ids = [SHARED.backend.token_to_id(symbol) for symbol in ("a", "ð", "Ł", "Į", "Ĭ", "b")]
    pieces = [decoder.push([token]) for token in ids]
    assert pieces == ["a", "", "", "", bytes.fromhex("f09f8c8a").decode(), "b"]


def test_garbage_is_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = SHARED.backend.token_to_id("Ģ")  # byte 0x80, a continuation without a start
    longest, decode = 0, Tokenizer.decode

    def measured(self: Tokenizer, ids: list[int], *, skip_special: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode", measured)
    decoder = IncrementalDecoder(SHARED)
    text = "".join(decoder.push([stray]) for _ in range(300)) + decoder.flush()
    assert text == "\ufffd" * 300
    assert longest < 20
