"""Small ICC profiles made by hand, with what they mean in plain arithmetic: no colour engine is asked."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_D50 = np.array([0.9642, 1.0, 0.8249])
# Bruce Lindbloom's matrices, adapted to D50: columns are red, green and blue
_SRGB = np.array(
    [[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169], [0.0139322, 0.0971045, 0.7141733]]
)
_WIDE: dict[str, tuple[Values, float]] = {
    "adobe": (
        np.array(
            [
                [0.6097559, 0.2052401, 0.1492240],
                [0.3111242, 0.6256560, 0.0632197],
                [0.0194811, 0.0608902, 0.7448387],
            ]
        ),
        2.19921875,
    ),
    "prophoto": (
        np.array(
            [
                [0.7976749, 0.1351917, 0.0313534],
                [0.2880402, 0.7118741, 0.0000857],
                [0.0, 0.0, 0.8252100],
            ]
        ),
        1.80078125,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """An ICC file for pictures of one mode, and sRGB (..., 3) in [0, 1] of their values in [0, 1]."""

    icc: bytes
    name: str

    def shown(self, values: Values) -> Values:
        """sRGB values that a viewer shows for stored values of this profile."""
        if self.name == "grey":
            return _from_xyz(values[..., :1] ** 1.5 * _D50)
        if self.name == "cmyk":
            return _from_xyz(_from_lab(_cmyk_lab(values)))
        matrix, gamma = _WIDE[self.name]
        return _from_xyz(values**gamma @ matrix.T)


def rgb(name: str) -> Profile:
    """`adobe` or `prophoto`: a matrix and one gamma."""
    matrix, gamma = _WIDE[name]
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    columns = {f"{letter}XYZ": _xyz(matrix[:, index]) for index, letter in enumerate("rgb")}
    curves = {f"{letter}TRC": curve for letter in "rgb"}
    return Profile(icc=_file(b"mntr", b"RGB ", b"XYZ ", {**columns, **curves}), name=name)


def grey() -> Profile:
    """Grey of gamma 1.5."""
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(1.5 * 256)) + bytes(2)
    return Profile(icc=_file(b"mntr", b"GRAY", b"XYZ ", {"kTRC": curve}), name="grey")


def cmyk() -> Profile:
    """Inks that move Lab along straight lines, so that every interpolation of the table is the same."""
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij"), -1).reshape(-1, 4)
    lab = _cmyk_lab(corners)
    encoded = np.stack([lab[:, 0] * 65280 / 100, *((lab[:, i] + 128) * 256 for i in (1, 2))], -1)
    identity = np.array([0, 65535], ">u2").tobytes()
    table = b"mft2" + bytes(4) + bytes([4, 3, 2, 0])
    table += struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    table += struct.pack(">HH", 2, 2) + identity * 4
    table += np.rint(encoded).astype(">u2").tobytes() + identity * 3
    return Profile(icc=_file(b"prtr", b"CMYK", b"Lab ", {"A2B0": table, "A2B1": table}), name="cmyk")


def _cmyk_lab(values: Values) -> Values:
    c, m, y, k = (values[..., index] for index in range(4))
    return np.stack(
        [100 - 20 * c - 20 * m - 10 * y - 50 * k, -30 * c + 30 * m, -20 * c - 10 * m + 40 * y], -1
    )


def _from_lab(lab: Values) -> Values:
    """XYZ of D50."""
    fy = (lab[..., 0] + 16) / 116
    f = np.stack([fy + lab[..., 1] / 500, fy, fy - lab[..., 2] / 200], -1)
    return np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * _D50


def _from_xyz(xyz: Values) -> Values:
    linear = np.clip(xyz @ np.linalg.inv(_SRGB).T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def _xyz(values: Values) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(float(value) * 65536) for value in values))


def _file(kind: bytes, space: bytes, connection: bytes, tags: dict[str, bytes]) -> bytes:
    """The header, the table of tags, the tags (ICC.1:2001-04)."""
    text = b"made for tests\0"
    described = b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78)
    tags = {"desc": described, "wtpt": _xyz(_D50), "cprt": b"text" + bytes(4) + text, **tags}
    tags = {name: data + bytes(-len(data) % 4) for name, data in tags.items()}
    start = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += name.encode() + struct.pack(">II", start + len(body), len(data))
        body += data
    header = struct.pack(">I", start + len(body)) + bytes(4) + struct.pack(">I", 0x02400000)
    header += kind + space + connection + struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(24)
    header += struct.pack(">I", 1) + struct.pack(">3i", *(round(float(v) * 65536) for v in _D50))
    return header.ljust(128, b"\0") + table + body
