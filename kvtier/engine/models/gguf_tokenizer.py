"""A `tokenizers.Tokenizer` from GGUF metadata: byte-level BPE, pre-tokenised as the model was trained."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvtier.errors import ModelError

__all__ = ["backend_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "llama-bpe": _llama3,
    "smollm": _smollm,
}


def backend_from_gguf(metadata: Mapping[str, Any], origin: str) -> Backend:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs.
        origin: the file's name, for messages.

    Raises:
        ModelError: another kind of tokenizer than byte-level BPE, an unknown pre-tokenizer, missing entries.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(f"{origin}: GGUF tokenizer {kind!r}: supported is gpt2 (byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{origin}: GGUF pre-tokenizer {pre!r}: supported are {', '.join(_PRE_TOKENIZERS)}")
    missing = [name for name in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{name}" not in metadata]
    if missing:
        raise ModelError(f"{origin}: no tokenizer.ggml.{missing[0]}: the file is incomplete, download it again")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the Rust side raises plain Exception on merges out of the vocabulary
        raise ModelError(f"{origin}: damaged tokenizer ({error}): download the file again") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    _add_bos(backend, metadata, tokens)
    return backend


def _add_bos(backend: Backend, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    # Llama 3's files leave the entry out, and mean yes.
    wanted = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    if wanted and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0",
            pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
