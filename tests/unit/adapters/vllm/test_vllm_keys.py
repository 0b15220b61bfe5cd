"""Names of vLLM's blocks, against the definition of chain keys; requests that have none."""

import hashlib
from types import SimpleNamespace

import numpy as np
from kvtier_vllm.keys import Tracked, nameable

from kvtier.hints import RequestHints
from kvtier.keys import encode_extra

SIZE = 4
TOKENS = list(range(100, 114))


def _request(tokens=TOKENS, **known):
    defaults = {
        "request_id": "r",
        "all_token_ids": tokens,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
        "kv_transfer_params": None,
    }
    request = SimpleNamespace(**defaults | known)
    request.num_tokens = len(request.all_token_ids)
    return request


def _chain(tokens, extras=()):
    extras, keys = dict(extras), [b""]
    for block in range(len(tokens) // SIZE):
        packed = np.asarray(tokens[block * SIZE : (block + 1) * SIZE], "<u4").tobytes()
        keys.append(hashlib.sha256(keys[-1] + packed + extras.get(block, b"")).digest())
    return keys[1:]


def _image(name, offset, length):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def _lora(path, name="adapter"):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def _adapter(path, content):
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


def test_plain_tokens_give_plain_chain_keys_that_grow():
    request = _request(list(TOKENS))
    tracked = Tracked(request, SIZE)
    assert tracked.chain == _chain(TOKENS)
    for token in range(10):
        request.all_token_ids.append(token)
        request.num_tokens += 1
        assert tracked.chain == _chain(request.all_token_ids)
    assert tracked.num_tokens == len(TOKENS) + 10


def test_a_salt_is_in_the_first_block_and_so_in_all():
    salted = Tracked(_request(cache_salt="s"), SIZE).chain
    assert salted == _chain(TOKENS, {0: encode_extra([("vllm.cache_salt", b"s")])})
    assert not set(salted) & set(_chain(TOKENS))


def test_images_name_the_blocks_that_they_touch_by_where_they_begin():
    request = _request(mm_features=[_image("a", 5, 4), _image("b", 9, 2)])

    def image(name, begins):
        return ("mm", encode_extra([(begins, name)]))

    expected = {1: [image(b"a", "1")], 2: [image(b"a", "-3"), image(b"b", "1")]}
    extras = {block: encode_extra(items) for block, items in expected.items()}
    assert Tracked(request, SIZE).chain == _chain(TOKENS, extras)
    moved = _request(mm_features=[_image("a", 6, 4), _image("b", 9, 2)])
    assert Tracked(moved, SIZE).chain[1:] != Tracked(request, SIZE).chain[1:]


def test_an_adapter_is_its_name_its_path_and_its_content(tmp_path):
    one = _adapter(tmp_path / "one", b"weights")
    plain, keys = Tracked(_request(), SIZE).chain, []
    for lora in (_lora(one), _lora(one, "other"), _lora(_adapter(tmp_path / "two", b"weights"))):
        assert nameable(_request(lora_request=lora))
        keys.append(Tracked(_request(lora_request=lora), SIZE).chain)
    changed = _adapter(tmp_path / "three", b"weights")
    before = Tracked(_request(lora_request=_lora(changed)), SIZE).chain
    from kvtier_vllm import keys as module

    module._adapter.cache_clear()
    (changed / "adapter_model.safetensors").write_bytes(b"Weights")
    keys += [before, Tracked(_request(lora_request=_lora(changed)), SIZE).chain]
    names = {key for chain in (plain, *keys) for key in chain}
    assert len(names) == 6 * len(plain)
    module._adapter.cache_clear()
    assert Tracked(_request(lora_request=_lora(one)), SIZE).chain == keys[0]


def test_what_tokens_do_not_tell_has_no_name(tmp_path):
    assert nameable(_request())
    assert not nameable(_request(prompt_embeds=object()))
    assert not nameable(_request(resumable=True))
    assert not nameable(_request(lora_request=_lora(tmp_path / "gone")))


def test_hints_come_with_the_transfer_parameters(caplog):
    given = {"priority": 4.0, "session": "chat", "end_of_session": True}
    assert Tracked(_request(kv_transfer_params={"kvtier": given}), SIZE).hints == RequestHints(**given)
    assert Tracked(_request(), SIZE).hints is None
    assert Tracked(_request(kv_transfer_params={"do_remote_prefill": True}), SIZE).hints is None
    assert not caplog.records
    for wrong in ({"priority": 0}, {"prio": 1}, 7):
        assert Tracked(_request(kv_transfer_params={"kvtier": wrong}), SIZE).hints is None
    assert caplog.text.count("is ignored") == 3
