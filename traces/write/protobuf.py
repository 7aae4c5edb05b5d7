"""Protobuf messages in a row, as files of several formats hold them."""

from __future__ import annotations

from typing import Any

_BYTES = [bytes([value]) for value in range(128)]


def varint(value: int) -> bytes:
    """A whole number in groups of seven bits, the last ones first.

    >>> varint(5), varint(300)
    (b'\\x05', b'\\xac\\x02')
    """
    if 0 <= value < 1 << 28:  # most, at once
        if value < 1 << 7:
            return _BYTES[value]
        if value < 1 << 14:
            return bytes((value & 127 | 128, value >> 7))
        if value < 1 << 21:
            return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14 & 127 | 128, value >> 21))
    value &= (1 << 64) - 1  # negative ones are written as if they were large
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def delimited(message: Any) -> bytes:
    """``message`` after its length."""
    data: bytes = message.SerializeToString()
    return varint(len(data)) + data
