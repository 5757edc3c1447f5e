"""Training GPUs among the machine's GPUs: refused GPUs, UUIDs, and CUDA's own numbering."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.energy_bench import probes_of
from tests.support.fake_nvml import H200, V100, FakeGpu, FakeNvml, FakeTorch
from zeus_plugins import energy
from zeus_plugins.energy import EnergyUnavailableError, EstimateMonitor, NvmlMonitor
from zeus_plugins.energy.nvml import cuda_devices, open_gpus
from zeus_plugins.errors import ZeusBSOConfigError

UUIDS = ("8932f937-d72c-4106-c12f-20bd9faed9f6", "0a1b2c3d-0000-1111-2222-333344445555")


def machine(*refusals: str | None) -> FakeNvml:
    """Return GPUs named A, B, …, some of which cannot be opened."""
    letters = "abcdefgh"[: len(refusals)]
    return FakeNvml(
        [FakeGpu(uuid=f"GPU-{each * 4}", refusal=refusal) for each, refusal in zip(letters, refusals, strict=True)]
    )


@pytest.mark.parametrize("refusal", ["Insufficient Permissions", "GPU is lost"])
def test_inaccessible_foreign_gpu_is_ignored(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (gpu,) = open_gpus(machine(None, refusal))
    assert gpu.uuid == "GPU-aaaa"


def test_indices_count_the_accessible_gpus_like_cuda() -> None:
    assert [gpu.uuid for gpu in open_gpus(machine("No Permission", None, None), [1])] == ["GPU-cccc"]


def test_without_any_accessible_gpu_the_training_is_estimated_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = energy.auto(probes=probes_of(machine("GPU is lost", "GPU is lost")))
    assert isinstance(monitor, EstimateMonitor)
    assert "no GPU of this machine can be opened (GPU 0: GPU is lost; GPU 1: GPU is lost)" in caplog.text


@pytest.mark.parametrize("setting", ["GPU-bb", "GPU-b", "GPU-bbbb"])
def test_prefix_of_a_uuid_suffices_as_for_cuda(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [gpu.uuid for gpu in open_gpus(machine(None, None))] == ["GPU-bbbb"]


@pytest.mark.parametrize(
    ("setting", "refusal", "error", "problem"),
    [
        ("GPU-", None, ZeusBSOConfigError, "GPU GPU- cannot be opened: several GPUs begin so"),
        ("GPU-aa,0", None, ZeusBSOConfigError, "the same GPU is named twice"),
        ("GPU-bbbb", "No Permission", EnergyUnavailableError, r"\(GPU 1: No Permission\)"),
    ],
    ids=["the beginning of two", "two names of one", "one of those refused is no mistake of the user's"],
)
def test_uuid_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, refusal: str | None, error: type[Exception], problem: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    with pytest.raises(error, match=problem):
        open_gpus(machine(None, refusal))


def test_gpus_are_named_by_uuid() -> None:
    monitor = NvmlMonitor(["GPU-cccc", "GPU-aaaa"], nvml=machine(None, None, None))
    assert monitor.gpus().number_of_gpus == 2
    assert [gpu.index for gpu in open_gpus(machine(None, None, None), ["GPU-cccc", "GPU-aaaa"])] == [2, 0]


# --- CUDA's numbering -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "indices", "found"),
    [((1, 0), [0], [1]), ((1, 0), None, [1, 0]), ((1,), [0], [1]), ((0,), None, [0])],
    ids=["the fastest first", "all of them", "one is visible", "the first is visible"],
)
def test_pytorch_determines_the_gpus_of_cuda(
    monkeypatch: pytest.MonkeyPatch, order: Sequence[int], indices: Sequence[int] | None, found: Sequence[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # set too late: CUDA has already started
    nvml = FakeNvml([FakeGpu(uuid=f"GPU-{uuid}") for uuid in UUIDS])
    torch = FakeTorch(*(UUIDS[place] for place in order))
    assert [gpu.index for gpu in open_gpus(nvml, indices, torch=torch)] == found


def test_mixed_machine_needs_no_cuda_order_if_pytorch_names_the_gpu() -> None:
    nvml = FakeNvml([FakeGpu(name=V100, uuid=f"GPU-{UUIDS[0]}"), FakeGpu(uuid=f"GPU-{UUIDS[1]}")])
    assert [gpu.name for gpu in open_gpus(nvml, [0], torch=FakeTorch(UUIDS[1], UUIDS[0]))] == [H200]
    with pytest.raises(ZeusBSOConfigError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        open_gpus(nvml, [0], torch=FakeTorch())


def test_training_on_an_inaccessible_gpu_is_unavailable_instead_of_replaced() -> None:
    nvml = FakeNvml([FakeGpu(uuid=f"GPU-{UUIDS[0]}", refusal="No Permission"), FakeGpu(uuid=f"GPU-{UUIDS[1]}")])
    with pytest.raises(EnergyUnavailableError, match=f"GPU {UUIDS[0]} cannot be opened"):
        open_gpus(nvml, [0], torch=FakeTorch(*UUIDS))
    with pytest.raises(EnergyUnavailableError, match="GPU 00000000-0000 cannot be opened: the driver does not list it"):
        open_gpus(machine(None, None), torch=FakeTorch("00000000-0000"))


def test_slice_named_by_a_bare_uuid_in_pytorch_is_found() -> None:
    nvml = FakeNvml([FakeGpu(uuid="aa", mig_mode=1, slices=[1] * 7)])
    with pytest.raises(EnergyUnavailableError, match="a MIG slice shares"):
        open_gpus(nvml, torch=FakeTorch("aa"))


def test_pytorch_is_not_asked_to_start_cuda() -> None:
    assert cuda_devices(None) is None
    assert cuda_devices(FakeTorch()) is None
    assert cuda_devices(object()) is None
