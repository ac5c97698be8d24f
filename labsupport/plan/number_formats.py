"""Which numbers does a floating-point format have, and how far apart do they lie?

    value   = ± (1 + fraction) · 2^exponent
    spacing = 2^(exponent - mantissa_bits)       between neighbours: doubles at each power of 2

    bf16 = FORMATS["bf16"]
    bf16.spacing_at(1.0), bf16.largest              # 0.0078125, 3.39e38
    bf16.round(1.001), bf16.stalls_at(1e-4)         # 1.0, 0.03125: adding 1e-4 goes no further

Names are those of the recipes; fp8 comes in two kinds, e4m3 (finer) and e5m2 (wider).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Sign, exponent and mantissa bits; rounding is to nearest, ties to even."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    """e4m3 has none: one pattern is NaN, the others are numbers, and torch's cast stops there."""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Below it the spacing shrinks no more."""
        return math.ldexp(1.0, 2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """The smallest number above 0; half of it or less is rounded to 0."""
        return self.spacing_at(0.0)

    @property
    def largest(self) -> float:
        """Half a step beyond it and more is infinity."""
        top = 2 ** (self.exponent_bits - 1) - int(self.has_infinity)  # its pattern, or not
        last = self.mantissa_bits if self.has_infinity else self.mantissa_bits - 1
        return math.ldexp(2 - math.ldexp(1.0, -last), top)

    def spacing_at(self, value: float) -> float:
        """From |value| to the next number away from 0."""
        size = max(abs(value), self.smallest_normal)
        return math.ldexp(1.0, math.frexp(size)[1] - 1 - self.mantissa_bits)

    def round(self, value: float) -> float:
        """The nearest number of this format; beyond the largest infinity, or the largest."""
        if not math.isfinite(value):
            return value
        step = self.spacing_at(value)
        near = round(value / step) * step  # Python rounds ties to even, as the hardware does
        if abs(near) <= self.largest:
            return near
        return math.copysign(math.inf if self.has_infinity else self.largest, value)

    def stalls_at(self, increment: float) -> float:
        """Where a sum of many equal increments stops to grow: they add half a step or less.

        Half a step is a tie, and a power of 2 is even. 0 where the increment is rounded to 0.
        """
        added = self.round(increment)
        if added == 0:
            return 0.0
        power = self.smallest_normal
        while self.spacing_at(power) / 2 < added:
            power *= 2
        return power

    @property
    def rounding_error(self) -> float:
        """Root mean square of the relative error of one rounding, over numbers of every size."""
        return 0.4247 * math.ldexp(1.0, -self.mantissa_bits - 1)  # 2 · √(1/12 · 3/(8 ln 2))

    def sum_error(self, num_terms: int) -> float:
        """Relative error of adding alike terms one by one, each sum rounded: √(1 + n/3) roundings.

        The k-th partial sum is k/n of the result, and its rounding error as much smaller.
        """
        partial = sum((k / num_terms) ** 2 for k in range(2, num_terms + 1))
        return self.rounding_error * math.sqrt(1 + partial)

    def neighbours(self, value: float, count: int) -> list[float]:
        """`count` numbers on each side of the nearest one to `value`, and that one, in order."""
        numbers = [self.round(min(max(value, -self.largest), self.largest))]
        for _ in range(count):
            numbers = [self._next(numbers[0], -1), *numbers, self._next(numbers[-1], 1)]
        return [number for number in numbers if abs(number) <= self.largest]

    def _next(self, number: float, direction: int) -> float:
        away = number == 0 or (number > 0) == (direction > 0)
        if away:
            return number + direction * self.spacing_at(number)
        inside = self.spacing_at(number * (1 - math.ldexp(1.0, -self.mantissa_bits - 2)))
        return number + direction * inside


FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        NumberFormat(name="fp32", exponent_bits=8, mantissa_bits=23),
        NumberFormat(name="bf16", exponent_bits=8, mantissa_bits=7),
        NumberFormat(name="fp16", exponent_bits=5, mantissa_bits=10),
        NumberFormat(name="fp8 e4m3", exponent_bits=4, mantissa_bits=3, has_infinity=False),
        NumberFormat(name="fp8 e5m2", exponent_bits=5, mantissa_bits=2),
    )
}
