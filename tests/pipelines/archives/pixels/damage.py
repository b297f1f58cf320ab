"""Damage to files of images."""

import struct

import numpy as np

HEADER = 420  # bytes that hold the directory and its values
EXTREMES = (0, 1, 2, 3, 7, 8, 16, 120, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
TAGS = (254, 256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 317, 322, 323, 324, 325, 330, 338, 339, 347, 33922)


def damaged(original: bytes, random: np.random.Generator) -> bytes:
    """One to four kinds of damage at once; most of it to what describes the pixels."""
    data = bytearray(original)
    for _ in range(random.integers(1, 5)):
        kind = random.integers(0, 9)
        place = int(random.integers(0, max(1, min(len(data), HEADER) if random.random() < 0.7 else len(data))))
        if kind == 0:
            data[place : place + 1] = bytes([random.integers(256)])
        elif kind == 1 and data:
            data[min(place, len(data) - 1)] ^= 1 << int(random.integers(8))
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            data += random.bytes(int(random.integers(1, 5000)))
        elif kind == 4:
            other, size = int(random.integers(0, len(data) + 1)), int(random.integers(1, 300))
            data[place : place + size], data[other : other + size] = (
                data[other : other + size],
                data[place : place + size],
            )
        elif kind == 5:
            data[place : place + 4] = struct.pack("<I", random.choice(EXTREMES))
        elif kind == 6:
            del data[place : place + int(random.integers(1, 40))]
        elif kind == 7:
            data[place:place] = random.bytes(int(random.integers(1, 40)))
        elif len(data) > 200:
            # One field of one entry: its tag, type, count or value.
            entry, field = 10 + 12 * int(random.integers(0, 16)), random.integers(4)
            if field == 0:
                data[entry : entry + 2] = struct.pack("<H", random.choice(TAGS))
            elif field == 1:
                data[entry + 2 : entry + 4] = struct.pack("<H", random.integers(0, 19))
            else:
                at = entry + (4 if field == 2 else 8)
                data[at : at + 4] = struct.pack("<I", random.choice(EXTREMES))
    return bytes(data)
