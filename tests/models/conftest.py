import pytest
import torch

from magis import zoo


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc):
    if "toy" in metafunc.fixturenames:
        metafunc.parametrize("toy", [name for name in zoo.names() if name.endswith("-toy")])
