"""Element types, independent of PyTorch."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Element type of a tensor; the value is its short name in printed programs."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3FN = "f8e4m3fn"
    F8E5M2 = "f8e5m2"
    C64 = "c64"
    C128 = "c128"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return _NBYTES[self]

    @property
    def is_floating(self) -> bool:
        """Whether it is a real floating-point type."""
        return self in _EPS

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number; 0 for integers and booleans."""
        return _EPS.get(self, _EPS[DType.F32] if self is DType.C64 else 0.0)


_NBYTES = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F8E4M3FN: 1,
    DType.F8E5M2: 1,
    DType.C64: 8,
    DType.C128: 16,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U64: 8,
    DType.U32: 4,
    DType.U16: 2,
    DType.U8: 1,
    DType.BOOL: 1,
}
_EPS = {
    DType.F64: 2.0**-52,
    DType.F32: 2.0**-23,
    DType.F16: 2.0**-10,
    DType.BF16: 2.0**-7,
    DType.F8E4M3FN: 2.0**-3,
    DType.F8E5M2: 2.0**-2,
}
