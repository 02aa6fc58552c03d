"""Vectors as they travel: the bytes that they have in memory, in Flower's ``Array``; no file format, no pickle."""

from __future__ import annotations

import ctypes
import sys
from reprlib import repr as short
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord

from fedasync.flower.failures import UnfitError

if TYPE_CHECKING:
    from torch import Tensor

STYPE = "fedasync.raw" if sys.byteorder == "little" else "fedasync.raw.big-endian"
"""How Flower's ``Array`` names the encoding of its bytes."""
FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number of each dtype that a model may have."""
SIZES = {**FLOATS, "int64": 8}


def dtype_name(dtype: object) -> str:
    """``torch.float32`` → ``float32``."""
    return str(dtype).removeprefix("torch.")


def packed(values: Tensor, integers: Tensor | None = None) -> ArrayRecord:
    """A model's vectors, copied once; from any device. Raises TypeError for what does not travel."""
    arrays = {"values": _array("values", values)}
    if integers is not None:
        arrays["integers"] = _array("integers", integers)
    return ArrayRecord(arrays)


def _array(name: str, tensor: Tensor) -> Array:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; a tensor would do")
    dtype = dtype_name(tensor.dtype)
    if dtype not in SIZES:
        raise TypeError(f"{name}: a tensor of {dtype} does not travel; one of {', '.join(SIZES)} would do")
    lying = tensor.detach().cpu().contiguous()
    # tensor.numpy() would mark the memory as shared, and who takes such a tensor over copies it.
    data = bytes((ctypes.c_char * lying.nbytes).from_address(lying.data_ptr())) if lying.nbytes else b""
    return Array(dtype=dtype, shape=tuple(lying.shape), stype=STYPE, data=data)


def unpacked(arrays: ArrayRecord, dtype: str, values: int, integers: int) -> tuple[Tensor, Tensor | None]:
    """The vectors of a model of P ``values`` of ``dtype`` and Q ``integers``, each in memory of its own.

    Raises UnfitError for any other arrays, before memory is made.
    """
    if strange := sorted(set(arrays) - {"values", "integers"}):
        raise UnfitError("wrong layout", f"unexpected arrays {short(strange)}; values and integers would do")
    wanted = [("values", dtype, values)]
    if integers or "integers" in arrays:
        wanted.append(("integers", "int64", integers))
    for name, kind, size in wanted:
        _check(arrays, name, kind, size)
    found = [_tensor(arrays[name], size) for name, _, size in wanted]
    return found[0], found[1] if len(found) > 1 else None


def _check(arrays: ArrayRecord, name: str, dtype: str, size: int) -> None:
    if name not in arrays:
        raise UnfitError("wrong layout", f"no array {name}; {size} numbers of {dtype} would do")
    array = arrays[name]
    if array.stype != STYPE:
        raise UnfitError("wrong encoding", f"{name}: stype {short(array.stype)}; {STYPE!r} would do")
    if array.dtype != dtype:
        raise UnfitError("wrong dtype", f"{name}: dtype {short(array.dtype)}, the model has {dtype}")
    if array.shape != (size,):
        raise UnfitError("wrong size", f"{name}: shape {short(list(array.shape))}, the model has [{size}]")
    if len(array.data) != (expected := size * SIZES[dtype]):
        raise UnfitError("wrong size", f"{name}: {len(array.data)} bytes, [{size}] of {dtype} are {expected}")


def _tensor(array: Array, size: int) -> Tensor:
    import torch

    tensor = torch.empty(size, dtype=getattr(torch, array.dtype))
    # Copied, since bytes must not be written; not by way of numpy, whose memory torch cannot take over.
    ctypes.memmove(tensor.data_ptr(), array.data, len(array.data))
    return tensor
