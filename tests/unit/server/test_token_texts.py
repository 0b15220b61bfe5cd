"""Tokens as text and bytes, for both families of tokenizers."""

from tiny_model import EOS, tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kvtier.engine.tokenizer import Tokenizer
from kvtier.server.tokens import TokenTexts


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models with byte fallback are: words with a leading mark, and bytes."""
    words = ["a", "▁", "▁hi", "hi", "é", "▁▁"]
    vocab = {"<unk>": 0, "</s>": 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + at for at, word in enumerate(words)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, frozenset({1}), None)


def test_every_byte_of_a_byte_level_vocabulary():
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    assert texts[EOS] == ("<eos>", b"<eos>")
    assert sorted(texts[token].data for token in range(1, 257)) == [bytes([byte]) for byte in range(256)]
    for text in ("naïve 🙂", " a\n\t", "\x00\x7f"):
        tokens = tokenizer.encode(text)
        assert b"".join(texts[token].data for token in tokens) == text.encode()
    (first, *_) = tokenizer.encode("é")
    assert texts[first].text == "\ufffd"
    assert texts[first].label == "bytes:\\xc3"
    assert texts[tokenizer.encode("a")[0]].label == "a"


def test_sentencepiece_keeps_its_spaces_and_bytes():
    tokenizer = byte_fallback_tokenizer()
    texts, ids = TokenTexts(tokenizer), tokenizer.backend.token_to_id
    assert texts[ids("▁hi")] == (" hi", b" hi")
    assert texts[ids("hi")] == ("hi", b"hi")
    assert texts[ids("▁▁")] == ("  ", b"  ")
    assert texts[ids("é")] == ("é", "é".encode())
    assert texts[ids("<0xF0>")] == ("\ufffd", b"\xf0")
    assert texts[ids("<0xF0>")].label == "bytes:\\xf0"
    assert texts[ids("<0x41>")] == ("A", b"A")


def test_a_token_beyond_the_vocabulary_is_nothing():
    # Models pad their embedding: such a token can be drawn.
    assert TokenTexts(tiny_tokenizer())[100_000] == ("", b"")
