"""How far ahead updates ask for memory: the table, the setting, and that no number depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_cases import Case, table_of

from offload import _native
from offload.errors import ConfigError
from offload.formats import FORMATS, StateFormat
from offload.kernels import CpuUpdateKernel, instruction_sets
from offload.kernels.cpu import PREFETCH_SETTING, prefetch_setting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = _native.prefetch_bytes()
    yield
    _native.set_prefetch_bytes(*before)


def test_the_table_is_by_vendor_and_family() -> None:
    intel, amd = _native.prefetch_of("GenuineIntel", 6), _native.prefetch_of("AuthenticAMD", 25)
    assert intel == (2048, 512)
    assert amd == (512, 512)
    assert _native.prefetch_of("AuthenticAMD", 21) == _native.prefetch_of("", 0) == intel  # the last row is anybody's


def test_this_processor_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFETCH_SETTING, raising=False)
    CpuUpdateKernel(threads=1).close()
    assert _native.prefetch_bytes() == _native.prefetch_of(*_native.processor())


def test_the_setting_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, wanted in (("1024", (1024, 1024)), ("0,256", (0, 256)), (" 4096 , 65536", (4096, 65536))):
        monkeypatch.setenv(PREFETCH_SETTING, asked)
        CpuUpdateKernel(threads=1).close()
        assert _native.prefetch_bytes() == wanted


@pytest.mark.parametrize("asked", ["-1", "65537", "x", "1,2,3", "1.5", ",", "9" * 5000])
def test_what_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    before = _native.prefetch_bytes()
    monkeypatch.setenv(PREFETCH_SETTING, asked)
    with pytest.raises(ConfigError, match=r"OFFLOAD_PREFETCH_BYTES.* give one number of bytes or two"):
        CpuUpdateKernel(threads=1)
    assert _native.prefetch_bytes() == before
    assert prefetch_setting({}) is None


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("ahead", [0, 256, 1000, 65536])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_bits_do_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch, instruction_set: str, ahead: int, form: StateFormat
) -> None:
    monkeypatch.setattr(Case, "state_format", form)
    with CpuUpdateKernel(threads=2, instruction_set=instruction_set) as kernel:
        _native.set_prefetch_bytes(ahead, ahead)
        case = Case.make(10_000)
        kernel.run(table_of([case]))
        case.check()
