"""One model of each kind for all tests: they only read them."""

import pytest

pytest.importorskip("transformers")

from transformers_world import MODELS, llama, opened


@pytest.fixture(scope="session", params=sorted(MODELS))
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="session")
def plain():
    return llama()


@pytest.fixture
def store(plain):
    store = opened(plain)
    yield store
    store.close()
