"""One rank's pages go down to a real disk and come back with the same bits, or are reported missing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_sglang.geometry import geometry_of
from kvtier_sglang.pages import PageStore
from kvtier_sglang.settings import read_settings

from kvtier.errors import CapacityError, FormatMismatch, KVTierError
from tests.sglang_world import MHA_LAYOUTS, MLA_LAYOUTS, FakePool, FakeRank, hashes, slots

POOLS = [(layout, False) for layout in MHA_LAYOUTS] + [(layout, True) for layout in MLA_LAYOUTS]


def opened(path, pool, rank=None, *, host="256KiB", writer=True, salt="", **tiering):
    nvme = {"path": str(path / "kv"), "capacity": "8MiB", "segment_size": "1MiB", "min_free": 0}
    extra = {"host": {"capacity": host}, "nvme": nvme, "salt": salt} | tiering
    return PageStore.open(read_settings(extra), geometry_of(pool, rank or FakeRank(), salt), writer=writer)


def counted(pages, operation, outcome):
    return pages.store.metrics.value("sglang_pages_total", operation=operation, outcome=outcome)


def below(pages):
    """Blocks on NVMe alone from now on."""
    pages.store.flush()
    pages.store.clear("host")
    return pages.store.stats()["nvme"]["blocks"]


@pytest.mark.parametrize(("layout", "mla"), POOLS)
def test_pages_come_back_from_disk_in_every_layout_and_by_both_interfaces(tmp_path, layout, mla):
    pool, names = FakePool(layout, mla=mla), hashes("chain", 10)
    rank = FakeRank(is_mla_model=mla)
    pages = opened(tmp_path, pool, rank)
    for page in range(10):
        pool.fill(page, page)
    wanted = [pool.bits(page) for page in range(10)]
    assert pages.save(names[:5], slots(range(5))) == [True] * 5
    assert (
        pages.save_flat(names[5:], [pool.get_data_page(int(slots([page])[0])) for page in range(5, 10)]) == [True] * 5
    )
    pages.close()

    again = FakePool(layout, mla=mla)
    pages = opened(tmp_path, again, rank)
    assert pages.present(names) == 10
    assert pages.present([*names, "0" * 64]) == 10
    # In other places than they came from, and not in order.
    places = [11, 0, 2, 4, 6, 8, 10, 1, 3, 5]
    assert pages.load(names, slots(places)) == [True] * 10
    assert [again.bits(place) for place in places] == wanted
    flat = [again.get_dummy_flat_data_page() for _ in names]
    assert pages.load_flat(names, flat) == [True] * 10
    for page, target in enumerate(flat):
        again.set_from_flat_data_page(int(slots([9])[0]), target)
        assert again.bits(9) == wanted[page]
    assert counted(pages, "load", "hit") == 20
    pages.close()


def test_a_page_that_is_missing_ends_the_run_and_its_place_is_left_alone(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 6)
    pages = opened(tmp_path, pool)
    for page in range(6):
        pool.fill(page, page)
    pages.save(names, slots(range(6)))
    pages.store.delete(pages.geometry.keys([bytes.fromhex(names[3])]))
    pool.buffer.zero_()
    assert pages.present(names) == 3
    assert pages.load(names, slots(range(6))) == [True] * 3 + [False] * 3
    assert not any(any(pool.bits(page)) for page in range(3, 6))
    pages.close()


def test_another_rank_model_dtype_or_salt_misses_what_lies_in_the_same_directory(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 2)
    pool.fill(0, 0)
    rank = FakeRank(tp_rank=0, tp_size=2)
    pages = opened(tmp_path, pool, rank)
    assert all(pages.save(names, slots([0, 1])))
    pages.close()
    others = [
        (FakePool("page_first"), FakeRank(tp_rank=1, tp_size=2), ""),
        (FakePool("page_first"), FakeRank(tp_rank=0, tp_size=4), ""),
        (FakePool("page_first"), FakeRank(tp_rank=0, tp_size=2, model_name="other"), ""),
        (FakePool("page_first", dtype=torch.float16), rank, ""),
        (FakePool("layer_first"), rank, ""),
        (FakePool("page_first"), rank, "revision 2"),
    ]
    for other, placed, salt in others:
        pages = opened(tmp_path, other, placed, salt=salt)
        assert pages.present(names) == 0
        assert pages.load(names, slots([0, 1])) == [False, False]
        assert not other.buffer.any()
        pages.close()
    pages = opened(tmp_path, pool, rank)
    assert pages.present(names) == 2
    pages.close()


def test_latents_that_one_rank_wrote_are_read_by_the_others(tmp_path):
    pool, names = FakePool("page_first", mla=True), hashes("chain", 3)
    for page in range(3):
        pool.fill(page, page)
    wanted = [pool.bits(page) for page in range(3)]
    pages = opened(tmp_path, pool, FakeRank(is_mla_model=True, tp_size=2))
    assert all(pages.save(names, slots(range(3))))
    pages.close()
    reader = opened(tmp_path, pool, FakeRank(is_mla_model=True, tp_rank=1, tp_size=2), writer=False)
    pool.buffer.zero_()
    assert reader.load(names, slots(range(3))) == [True] * 3
    assert [pool.bits(page) for page in range(3)] == wanted
    # It is told that the writer stores what it does not.
    more = hashes("more", 2)
    assert reader.save(more, slots(range(2))) == [True, True]
    assert reader.present(more) == 0
    assert counted(reader, "save", "other_rank") == 2
    reader.close()


def test_split_heads_are_read_by_ranks_of_another_tp_size(tmp_path):
    names = hashes("chain", 4)
    many = FakePool("page_head", heads=4)
    for page in range(4):
        many.fill(page, page)
    writer = opened(tmp_path, many, FakeRank(tp_rank=0, tp_size=1, tp_lcm_size=2, should_split_heads=True))
    assert all(writer.save(names[:3], slots(range(3))))
    assert all(writer.save_flat(names[3:], [many.get_data_page(int(slots([3])[0]))]))
    writer.close()
    for rank in range(2):
        few = FakePool("page_head", heads=2)
        pages = opened(tmp_path, few, FakeRank(tp_rank=rank, tp_size=2, tp_lcm_size=2))
        assert pages.load(names, slots(range(4))) == [True] * 4
        assert all(torch.equal(few.page(at), many.page(at)[:, 2 * rank : 2 * rank + 2]) for at in range(4))
        pages.close()


def test_128_pages_pass_through_a_host_that_holds_few(tmp_path):
    pool, names = FakePool("layer_first", pages=128), hashes("chain", 128)
    for page in range(128):
        pool.fill(page, page)
    wanted = [pool.bits(page) for page in range(128)]
    pages = opened(tmp_path, pool, host="64KiB")
    assert pages.save(names, slots(range(128))) == [True] * 128
    assert below(pages) == 128, "none of them was dropped on the way"
    pool.buffer.zero_()
    assert pages.load(names, slots(range(128))) == [True] * 128
    assert [pool.bits(page) for page in range(128)] == wanted
    assert sum(one.pages for one in pages.loads) == sum(one.pages for one in pages.saves) == 128
    pages.close()


def test_a_target_that_is_no_page_ends_the_run_and_is_left_alone(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 4)
    pages = opened(tmp_path, pool)
    for page in range(4):
        pool.fill(page, page)
    assert all(pages.save(names, slots(range(4))))
    size = pages.geometry.page_bytes // 2
    plain = torch.zeros(1, size, dtype=torch.bfloat16)
    spread = torch.zeros(size, 3, dtype=torch.bfloat16)[:, 1]
    short = torch.zeros(size - 1, dtype=torch.bfloat16)
    assert not spread.is_contiguous()
    targets = [plain, spread, short, torch.zeros(size, dtype=torch.bfloat16)]
    assert pages.load_flat(names, targets) == [True, True, False, False]
    assert spread.contiguous().view(torch.uint8).numpy().tobytes() == pool.bits(1)
    assert not short.any()
    assert not targets[3].any()
    assert counted(pages, "load", "wrong_size") == 1
    assert pages.save_flat(hashes("other", 2), [short, targets[3]]) == [False, False]
    # Values that are not contiguous are stored as they read.
    assert pages.save_flat(hashes("spread", 1), [spread]) == [True]
    back = torch.zeros(size, dtype=torch.bfloat16)
    assert pages.load_flat(hashes("spread", 1), [back]) == [True]
    assert torch.equal(back, spread)
    pages.close()


@pytest.mark.parametrize(
    "name", ["", "xyz", "00" * 31, "00" * 33, "g" * 64, "ab " * 32, "\t\t" + "0" * 62, "0" * 64 + ".mamba"]
)
def test_what_is_no_hash_is_missing_and_is_not_stored(tmp_path, name):
    pool, good = FakePool("page_first"), hashes("chain", 1)
    pages = opened(tmp_path, pool)
    assert pages.save([good[0], name], slots([0, 1])) == [True, False]
    assert pages.present([good[0], name]) == 1
    assert pages.load([good[0], name], slots([0, 1])) == [True, False]
    assert pages.present([name]) == 0
    assert counted(pages, "save", "bad_hash") == 1
    pages.close()


def test_a_default_device_is_no_place_for_pages(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 1)
    pool.fill(0, 0)
    there, page = slots([0]), pool.get_data_page(0)
    spread = torch.zeros(page.numel(), 2, dtype=page.dtype)[:, 0]
    with torch.device("meta"):
        pages = opened(tmp_path, pool)
        assert pages.save(names, there) == [True]
        assert pages.load_flat(names, [spread]) == [True]
        pages.close()
    assert torch.equal(spread, page)


def test_as_many_hashes_as_pages_are_expected(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 2)
    pages = opened(tmp_path, pool)
    flat = [pool.get_dummy_flat_data_page() for _ in range(3)]
    for move in (pages.save, pages.load):
        for places in ([0], [0, 1, 2]):
            with pytest.raises(FormatMismatch, match=f"2 hashes for {len(places)} pages"):
                move(names, slots(places))
    for move in (pages.save_flat, pages.load_flat):
        for some in (flat[:1], flat):
            with pytest.raises(FormatMismatch, match=f"2 hashes for {len(some)} pages"):
                move(names, some)
    assert pages.present(names) == 0
    pages.close()


def test_threads_at_once_get_right_pages_or_none(tmp_path):
    """Loads, saves and clears of the same chains, through a host that holds a fraction of them, and a close at last."""
    pool = FakePool("layer_first", pages=6 * 24)
    pages = opened(tmp_path, pool, host="128KiB")
    chains = [hashes(chain, 12) for chain in range(3)]
    right, wrong = [], []

    def worker(number):
        mine = range(24 * number, 24 * number + 24)
        for step in range(6):
            names = chains[(number + step) % len(chains)]
            for place, name in zip(mine[:12], names, strict=True):
                pool.fill(place, name)
            pages.save(names, slots(mine[:12]))
            for place in mine[12:]:
                pool.page(place).zero_()
            arrived = pages.load(names, slots(mine[12:]))
            for source, place, good in zip(mine[:12], mine[12:], arrived, strict=True):
                expected = pool.bits(source) if good else bytes(pages.geometry.page_bytes)
                if pool.bits(place) != expected:
                    wrong.append((place, good))
                elif good:
                    right.append(place)
            if number == 0 and step == 2:
                pages.clear()
            if number == 0 and step == 5:
                pages.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(worker, range(6)))
    assert right
    assert not wrong
    assert pages.present(chains[0]) == 0


def test_clear_takes_this_models_pages_and_no_others(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 3)
    other = opened(tmp_path, pool, FakeRank(model_name="other"))
    assert all(other.save(names, slots(range(3))))
    other.close()
    pages = opened(tmp_path, pool)
    assert all(pages.save(names, slots(range(3))))
    pages.store.flush()
    pages.clear()
    assert pages.present(names) == 0
    pages.close()
    other = opened(tmp_path, pool, FakeRank(model_name="other"))
    assert other.present(names) == 3
    other.close()


def test_after_close_pages_are_missing(tmp_path):
    pool, names = FakePool("page_first"), hashes("chain", 2)
    pages = opened(tmp_path, pool)
    pages.save(names, slots([0, 1]))
    pages.close()
    pages.close()
    assert pages.present(names) == 0
    assert pages.load(names, slots([0, 1])) == [False, False]
    assert pages.save(names, slots([0, 1])) == [False, False]


def test_a_tier_that_cannot_be_opened_or_is_too_small_says_so_at_once(tmp_path):
    pool = FakePool("page_first")
    with pytest.raises(CapacityError, match=r"tiering\.host\.capacity = 16384 bytes: as staging"):
        opened(tmp_path, pool, host="16KiB")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(KVTierError, match="file"):
        opened(tmp_path / "file", pool)


@settings(max_examples=25)
@given(data=st.data())
def test_a_dict_would_have_done_the_same(tmp_path_factory, data):
    pool = FakePool("page_first_direct")
    pages = opened(tmp_path_factory.mktemp("pages"), pool)
    known = [name for chain in range(2) for name in hashes(chain, 4)]
    model: dict[str, bytes] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(known) - 1))
        names = known[start : data.draw(st.integers(start + 1, len(known)))]
        places = list(range(len(names)))
        run = next((at for at, name in enumerate(names) if name not in model), len(names))
        match data.draw(st.sampled_from(["save", "load", "present", "clear", "sink"])):
            case "save":
                # A hash names its bytes: what a slow disk did not own up to in time is stored once more.
                for at in places:
                    pool.fill(at, (start + at, 0))
                assert pages.save(names, slots(places)) == [True] * len(names)
                model |= {names[at]: pool.bits(at) for at in places}
            case "load":
                pool.buffer.zero_()
                assert pages.load(names, slots(places)) == [at < run for at in places]
                assert [pool.bits(at) for at in range(run)] == [model[name] for name in names[:run]]
                assert not any(any(pool.bits(at)) for at in range(run, 12))
            case "present":
                assert pages.present(names) == run
            case "clear":
                pages.clear()
                model.clear()
            case "sink":
                below(pages)
    pages.close()
