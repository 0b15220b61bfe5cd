"""What an adapter must do when tiers fail, requests are aborted and device blocks run out."""

from pathlib import Path

from kvtier.testing.adapter_case import AdapterCase
from kvtier.testing.faults import Fault, Kind

__all__ = ["AdapterFaultSuite"]

_BELOW = (
    Fault("*", Kind.UNAVAILABLE),
    Fault("*", Kind.TIMEOUT),
    Fault("acquire", Kind.EIO, first_item=1),
    Fault("acquire", Kind.VANISH, first_item=2),
    Fault("acquire", Kind.CORRUPT),
    Fault("read", Kind.EIO),
    Fault("read", Kind.SHORT, first_item=1),
    Fault("read", Kind.VANISH),
    Fault("read", Kind.CORRUPT, first_item=3),
)
_HOST = (
    Fault("acquire", Kind.UNAVAILABLE),
    Fault("acquire", Kind.EIO, first_item=1),
    Fault("acquire", Kind.VANISH, first_item=2),
    Fault("reserve", Kind.ENOSPC, first_item=1),
    Fault("seal", Kind.UNAVAILABLE),
    Fault("commit", Kind.REFUSE, first_item=1),
)
_HANGS = ("contains", "acquire", "read", "write")


class AdapterFaultSuite(AdapterCase):
    """Part of `AdapterSuite`."""

    def test_corrupt_blocks_are_computed_again(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "corrupt")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            tiers.leave_on_nvme()
            tiers.rot()
            self._assert_loads(engine, prompt, "nvme", 0)
            # What was computed again is as good as the first time.
            self._forget(engine)
            tiers.leave_on_nvme()
            self._assert_loads(engine, prompt, "nvme")

    def test_a_load_that_fails_half_way_is_computed_from_there(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "half")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            for good in (0, 1, 4):
                self._forget(engine)
                tiers.leave_on_nvme()
                tiers.nvme.inject(Fault("read", Kind.EIO, first_item=good))
                with self._loaded(engine) as loaded:
                    self._assert_answers(engine, [prompt, self._blocks(2.5, f"beside {good}")])
                assert loaded.tokens <= good * self.block_tokens
                assert tiers.nvme.injected[("read", Kind.EIO)]
                tiers.heal()

    def test_a_failing_tier_changes_no_output(self, tmp_path: Path) -> None:
        prompt = self._blocks(6.5, "failing")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            for fault in _BELOW:
                self._forget(engine)
                tiers.leave_on_nvme()
                tiers.nvme.inject(fault)
                self._assert_answers(engine, [prompt])
                assert sum(tiers.nvme.injected.values()), fault
                tiers.nvme.injected.clear()
                tiers.heal()
            for number, fault in enumerate(_HOST):
                self._forget(engine)
                tiers.host.inject(fault)
                self._assert_answers(engine, [prompt, self._blocks(3.5, f"new {number}")])
                assert sum(tiers.host.injected.values()), fault
                tiers.host.injected.clear()
                tiers.heal()
            # Once they are well again they are used again.
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            self._assert_loads(engine, prompt, "host")

    def test_a_hanging_tier_stalls_nobody(self, tmp_path: Path) -> None:
        prompt = self._blocks(5.5, "hanging")
        with self._open(tmp_path, load_deadline=0.5) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            for verb in _HANGS:
                self._forget(engine)
                tiers.leave_on_nvme()
                tiers.nvme.inject(Fault(verb, Kind.HANG))
                with self._never_stalls(tiers):
                    self._assert_answers(engine, [prompt, self._blocks(2.5, f"beside {verb}")])
                tiers.heal()
                self._assert_nothing_is_held(tiers)
            assert all(tiers.nvme.injected[verb, Kind.HANG] for verb in ("acquire", "read"))

    def test_aborts_leave_nothing_held(self, tmp_path: Path) -> None:
        prompts = [self._blocks(5.5, f"aborted {number}") for number in range(3)]
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, prompts[:2])
            for steps in range(8):
                self._forget(engine)
                tiers.leave_on_nvme()
                engine.abort([*prompts, prompts[0]], 6, steps)
                self._assert_nothing_is_held(tiers)
            self._forget(engine)
            self._assert_answers(engine, [*prompts, prompts[0]])

    def test_blocks_that_are_used_again_were_saved_before(self, tmp_path: Path) -> None:
        """Many prompts go through a pool that holds two: blocks are written over as soon as their request ends."""
        prompts = [self._blocks(5.5, f"crowd {number}") for number in range(10)]
        with self._open(tmp_path) as tiers, self._engine(tiers, device_blocks=14) as engine:
            self._assert_answers(engine, prompts, 2)
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            for prompt in prompts:
                self._assert_loads(engine, prompt, "nvme")

    def test_preempted_requests_go_on_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        prompts, tokens = [self._blocks(4.5, f"crowded {number}") for number in range(3)], 5 * self.block_tokens
        with self._open(tmp_path) as tiers, self._engine(tiers, device_blocks=18) as engine:
            self._assert_answers(engine, prompts, tokens)
            assert engine.preemptions() > 0 or not self.preempts
