"""Tell how much of a disk an amount in stage.toml means. Pure."""

from __future__ import annotations

#: Bytes, or a text such as ``5%``: of each disk.
Amount = int | str


def amount_of(amount: Amount, disk: int) -> int:
    """Return the bytes that ``amount`` means on a disk of ``disk`` bytes.

    >>> amount_of(50, 1000), amount_of("2.5%", 1000)
    (50, 25)
    """
    return int(disk * float(amount[:-1]) / 100) if isinstance(amount, str) else amount
