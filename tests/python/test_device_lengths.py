"""Lengths and page ids on a device, without one: arrays in host memory that say they are on CUDA, which only a framework may read."""

import ctypes

import numpy as np
import pytest
from conftest import arrays

import lean_attention
from lean_attention import Options, _core, _frameworks, check_lengths, decode

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class OnDevice:
    """A NumPy array whose DLPack capsule names device CUDA 0."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, stream=None, **_):
        capsule = self.array.__dlpack__()
        tensor = _pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + ctypes.sizeof(ctypes.c_void_p)).value = 2  # DLTensor: data, device type, device index
        return capsule


class DeviceFramework(_frameworks.Framework):
    copied = ()

    def empty(self, like, shape):
        return OnDevice(np.zeros(shape, like.dtype))

    def int32(self, like, values):
        return OnDevice(np.array(values, np.int32))

    def float32(self, like, values):
        return OnDevice(np.array(values, np.float32))

    def on_host(self, array):
        self.copied = (*self.copied, array)
        return array.array

    def stream(self, like):
        return 0


@pytest.fixture(autouse=True)
def framework(monkeypatch):
    stub = DeviceFramework()
    monkeypatch.setitem(_frameworks._BY_TYPE, OnDevice, stub)
    return stub


def int32(*values):
    return OnDevice(np.array(values, np.int32))


def call(**arguments):
    q, k, v = (OnDevice(x.astype(np.float16)) for x in arrays())
    return dict(q=q, k=k, v=v) | arguments


def pages(**arguments):
    pool = OnDevice(np.ones((6, 4, 2, 40), np.float16))
    return dict(q=OnDevice(np.ones((2, 6, 40), np.float16)), k=pool, v=pool, layout="bshd") | arguments


POOLED = dict(seqlens=int32(12, 9), block_table=OnDevice(np.array([[0, 1, 2], [3, 4, 99]], np.int32)))


@pytest.mark.parametrize(
    "message, arguments",
    [
        (r"seqlens\[0\] = 500: allowed 0 to 37", call(seqlens=int32(500, 5))),
        (r"leftpad\[1\] = 6: allowed 0 to 5", call(seqlens=int32(37, 5), leftpad=int32(0, 6))),
        (r"block_table\[1, 2\] = 99: allowed 0 to 5", pages(**POOLED)),
        (r"page_indices\[2\] = 6: allowed", pages(page_indptr=int32(0, 1, 3), page_indices=int32(0, 1, 6))),
        (r"page_indptr\[2\] = 4: page_indices has 3", pages(page_indptr=int32(0, 1, 4), page_indices=int32(0, 1, 2))),
    ],
)
def test_check_lengths_copies_and_names_the_entry(message, arguments):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_lengths(**arguments)
    with pytest.raises(ValueError, match=f"^{message}"):  # before anything is asked of a device
        decode(**arguments, options=Options(check_lengths=True))


def test_what_is_right_passes(framework):
    check_lengths(**call(seqlens=int32(37, 0), leftpad=int32(5, 0)))
    assert len(framework.copied) == 2


@pytest.mark.parametrize("lengths", [[500, 5], 500])
def test_lists_are_checked_without_a_copy(framework, lengths):
    with pytest.raises(ValueError, match=r"^seqlens\[0\] = 500: allowed 0 to 37"):
        decode(**call(seqlens=lengths))
    with pytest.raises(TypeError, match=r"^seqlens\[0\] = 1.9: an integer"):
        decode(**call(seqlens=[1.9, 5]))
    assert not framework.copied


@pytest.mark.skipif(_core.machine()["cuda_built"], reason="would ask the driver about host memory")
def test_arrays_on_a_device_are_not_looked_at(framework):
    for arguments in (call(seqlens=int32(500, 5)), pages(**POOLED), call(seqlens=[37, 5])):
        with pytest.raises(NotImplementedError, match="CUDA"):
            decode(**arguments)
    assert not framework.copied


def test_devices_must_agree():
    with pytest.raises(ValueError, match="^seqlens: is on the CPU: must be on the device of q, cuda:0"):
        lean_attention.supports(**call(seqlens=np.array([1, 2], np.int32)))
