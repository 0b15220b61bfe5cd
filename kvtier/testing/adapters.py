"""AdapterSuite: what every adapter of an engine must do, with a real engine over real tiers.

It compares tokens with a reference, and loaded bytes with what follows from the layout; hit counters prove nothing.
"""

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.testing.adapter_case import AdapterSetup
from kvtier.testing.adapter_faults import AdapterFaultSuite

__all__ = ["AdapterSuite"]


class AdapterSuite(AdapterFaultSuite):
    """Subclass it in a module that pytest collects, and say how to make the engine (see `AdapterCase`)."""

    def test_the_model_notices_a_wrong_token(self) -> None:
        """Tokens prove something only where they depend on all KV: else take other weights."""
        prompt = self._blocks(7.5, "noticed")
        places, answer = range(0, len(prompt) - 1, max(1, len(prompt) // 24)), self.reference(prompt, 4)
        changed = [prompt[:at] + self._prompt(f"wrong {at}", 1) + prompt[at + 1 :] for at in places]
        noticed = sum(self.reference(other, 4) != answer for other in changed)
        assert noticed >= 0.6 * len(places), f"{noticed} of {len(places)} wrong tokens changed the answer"

    # ---- where a prefix is found

    def test_cold(self, tmp_path: Path) -> None:
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            for blocks in (0.25, 1, 4.5):
                self._assert_loads(engine, self._blocks(blocks, f"cold {blocks}"), "host", 0)

    def test_found_in_host(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "host")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            self._assert_loads(engine, prompt, "host")
            if self.device_prefix:
                self._assert_loads(engine, prompt, "host", 0)

    def test_found_on_nvme(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "nvme")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            tiers.leave_on_nvme()
            self._assert_loads(engine, prompt, "nvme")
            # It came up into host on its way.
            self._forget(engine)
            self._assert_loads(engine, prompt, "host")

    def test_found_after_a_restart(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "restart")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_loads(engine, prompt, "nvme")

    def test_lengths_around_block_edges(self, tmp_path: Path) -> None:
        size = self.block_tokens
        lengths = sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size})
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            prompts = [self._prompt(f"edge {length}", length) for length in lengths if length]
            for prompt in prompts:
                self._assert_answers(engine, [prompt])
            self._forget(engine)
            for prompt in prompts:
                self._assert_loads(engine, prompt, "host")

    def test_what_lies_partly_on_the_device(self, tmp_path: Path) -> None:
        prompt = self._blocks(7.5, "partly")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            self._forget(engine)
            first = prompt[: 3 * self.block_tokens + 1]
            self._assert_loads(engine, first, "host")
            there = self.loadable(len(first)) if self.device_prefix else 0
            self._assert_loads(engine, prompt, "host", self.loadable(len(prompt)) - there)

    def test_blocks_lie_where_they_belong(self, tmp_path: Path) -> None:
        """Attention to a whole prefix hides in which order its blocks lie; attention to its beginning does not."""
        prompt = self._blocks(7.5, "order")
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_answers(engine, [prompt])
            for blocks in (1, 3, 6):
                self._forget(engine)
                self._assert_loads(engine, prompt, "host")
                fork = prompt[: blocks * self.block_tokens] + self._blocks(1.5, f"fork {blocks}")
                self._assert_answers(engine, [fork])

    def test_the_next_turn_finds_the_answer_before_it(self, tmp_path: Path) -> None:
        prompt, tokens = self._blocks(2.5, "turn"), 2 * self.block_tokens
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            answer = engine.generate([prompt], tokens)[0]
            assert answer == self.reference(prompt, tokens)
            self._forget(engine)
            # The last token of an answer has no KV.
            first = (*prompt, *answer[:-1])
            turn = (*prompt, *answer, *self._blocks(1.5, "next"))
            self._assert_loads(engine, turn, "host", len(first) // self.block_tokens * self.block_tokens)

    # ---- together

    def test_shared_prefixes_together(self, tmp_path: Path) -> None:
        shared = self._blocks(4, "shared")
        prompts = [shared + self._blocks(1.5, f"tail {number}") for number in range(3)] + [shared]
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            with self._loaded(engine) as loaded:
                self._assert_answers(engine, prompts)
            # One that runs prompts in turn finds what the first of them left in host.
            assert not (self.device_prefix and loaded.nbytes)
            for tier in ("host", "nvme"):
                self._forget(engine)
                if tier == "nvme":
                    tiers.leave_on_nvme()
                with self._loaded(engine) as loaded:
                    self._assert_answers(engine, prompts)
                # At least each block once, at most each request its own.
                blocks = sum(loaded.nbytes.values()) / self.block_bytes
                assert set(loaded.nbytes) <= {"host", tier}
                assert 7 <= blocks <= 3 * 5 + 4, loaded

    def test_two_engines_on_one_store(self, tmp_path: Path) -> None:
        prompts = [self._blocks(5.5, f"both {number}") for number in range(2)]
        with self._open(tmp_path) as tiers, self._engine(tiers) as one:
            with self._engine(tiers) as two:
                self._assert_answers(one, prompts[:1])
                self._assert_loads(two, prompts[0], "host")
                self._assert_answers(two, prompts[1:])
                self._assert_loads(one, prompts[1], "host")
            # The one that ended took nothing with it.
            self._forget(one)
            for prompt in prompts:
                self._assert_loads(one, prompt, "host")

    # ---- what must not be found

    def test_another_namespace_is_a_miss(self, tmp_path: Path) -> None:
        prompt = self._blocks(5.5, "namespace")
        with self._open(tmp_path) as tiers:
            with self._engine(tiers, salt="one") as engine:
                self._assert_answers(engine, [prompt])
            with self._engine(tiers, salt="two") as engine:
                self._assert_loads(engine, prompt, "host", 0)
            with self._engine(tiers, salt="one") as engine:
                self._assert_loads(engine, prompt, "host")

    def test_lossy_blocks_only_for_those_who_ask(self, tmp_path: Path) -> None:
        if self.lossy_format is None:
            self._assert_refuses_lossy(tmp_path)
            return
        prompt = self._blocks(4, "lossy")
        longer = prompt + self._blocks(3.5, "on top")
        lossy = self._open(tmp_path, formats={"nvme": self.lossy_format}, accept_lossy=True)
        with lossy as tiers, self._engine(tiers, accept_lossy=True) as engine:
            self._assert_answers(engine, [prompt])
        # On top of lossy KV one computes KV that is not exact either, whatever its format.
        with self._open(tmp_path, accept_lossy=True) as tiers, self._engine(tiers, accept_lossy=True) as engine:
            with self._loaded(engine) as loaded:
                engine.generate([longer], 1)
            assert loaded.tokens == len(prompt)
        with self._open(tmp_path) as tiers, self._engine(tiers) as engine:
            self._assert_loads(engine, prompt, "nvme", 0)
            self._forget(engine)
            self._assert_loads(engine, longer, "host", len(prompt))

    def _assert_refuses_lossy(self, path: Path) -> None:
        """An adapter whose blocks no lossy format can take says so before anything runs."""
        refusal = ""
        with self._open(path, formats={"host": "int8"}, accept_lossy=True) as tiers:
            try:
                self.make_engine(AdapterSetup(tiers.store, self.device_blocks, accept_lossy=True)).close()
            except ConfigError as error:
                refusal = str(error)
        assert "int8" in refusal, "an engine started over a host tier in int8, which its blocks cannot take"
