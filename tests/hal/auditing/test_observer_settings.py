"""Settings of torch are named at the line that set them, and torch's setters come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from observed import observe

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """As they were."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = True


def _product() -> None:
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    _product()


def _precision() -> None:
    torch.set_float32_matmul_precision("medium")
    _product()


def _property() -> None:
    torch.backends.mkldnn.enabled = False
    _product()


def _flags() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        _product()


def _anomaly() -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        _product()


def _attention() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*(torch.randn(1, 2, 4, 8) for _ in range(3)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("program", "setting"),
    [
        (_deterministic, "deterministic_algorithms"),
        (_precision, "float32_matmul_precision"),
        (_property, "mkldnn"),
        (_flags, "mkldnn"),
        (_anomaly, "anomaly_mode"),
        (_attention, "flash_sdp"),
    ],
)
def test_the_line_that_set_it(program: Callable[[], None], setting: str) -> None:
    place = observe(program).settings_places[setting]
    assert Path(place.file).name == HERE
    assert place.line == program.__code__.co_firstlineno + 1
    assert place.function == program.__name__


def test_setters_come_back_and_a_default_has_no_place() -> None:
    names = [name for name in dir(torch._C) if name.startswith("_set_")]
    before = [getattr(torch._C, name) for name in names]
    enabled = vars(type(torch.backends.mkldnn))["enabled"].setter

    def program() -> None:
        torch.use_deterministic_algorithms(False)
        _product()

    assert observe(program).settings_places == {}
    assert [getattr(torch._C, name) for name in names] == before
    assert vars(type(torch.backends.mkldnn))["enabled"].setter is enabled
