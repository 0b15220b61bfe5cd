"""SmolLM2-135M in fp32, through the one line that a user types, and with NVMe below."""

from vllm_world import Vllm, tiers, transfer_config

TEXT = "The history of the lighthouse begins with fires that were lit on hilltops. "
QUESTIONS = [
    TEXT * 20 + "In one word, what does this text speak about?",
    TEXT * 20 + "The capital of France is",
    "The capital of France is",
]
OUTPUT = 12


def test_a_real_model_answers_alike_from_every_tier(default_model, tmp_path):
    options = {"skip_tokenizer_init": False, "blocks": 256, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    with Vllm(default_model, **options) as plain:
        tokenizer = plain.llm.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in QUESTIONS]
        expected = plain.alone(prompts, OUTPUT)
    assert "Paris" in tokenizer.decode(expected[-1])
    with Vllm(default_model, tiers(tmp_path / "nvme", host="256MiB"), **options) as vllm:
        assert vllm.tokens(prompts, OUTPUT) == expected
        for tier in ("host", "nvme"):
            vllm.only(tier)
            before = vllm.loaded().get(tier, 0)
            assert vllm.alone(prompts, OUTPUT) == expected
            assert vllm.loaded()[tier] - before > 0
        vllm.check_at_rest()


def test_without_any_setting_there_is_a_host_tier(default_model):
    config = transfer_config({}, "fail")
    assert config.kv_connector_extra_config == {}
    options = {"skip_tokenizer_init": False, "blocks": 64, "max_model_len": 1024}
    with Vllm(default_model, {}, policy="fail", **options) as vllm:
        prompt = vllm.llm.get_tokenizer().encode(QUESTIONS[0])
        cold = vllm.tokens([prompt], OUTPUT)
        vllm.only("host")
        assert vllm.tokens([prompt], OUTPUT) == cold
        assert vllm.loaded()["host"] > 0
