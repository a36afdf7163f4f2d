"""Amounts as people read them."""

import pytest

from pretrax import amounts


@pytest.mark.parametrize(
    ('number', 'shown'),
    [(7.0, '7 B'), (950, '950 B'), (999.7, '1 kB'), (45_123, '45.1 kB'), (1.5e9, '1.5 GB'), (-2e6, '-2 MB'), (3e24,
    '3e+24 B')],
)  # fmt: skip
def test_sizes_have_three_digits(number, shown):
    assert amounts.size(number) == shown
    assert amounts.prefixed(number) == shown.replace('B', '').rstrip()


@pytest.mark.parametrize(
    ('seconds', 'shown'),
    [(0.05, '50 ms'), (42.12, '42.1 s'), (301, '5 min 1 s'), (5025, '1 h 24 min'), (2e5, '2 d 7 h')],
)
def test_durations_have_two_units(seconds, shown):
    assert amounts.duration(seconds) == shown


def test_ages():
    assert [amounts.age(seconds) for seconds in (-1, 5.9, 60, 7300, 200_000)] == ['0 s', '5 s', '1 min', '2 h', '2 d']


@pytest.mark.parametrize(
    ('seconds', 'shown'),
    [(0, '0'), (2.5e-9, '2.50 ns'), (9.9996e-7, '1.00 us'), (1.234e-3, '1.23 ms'), (75, '75.0 s'), (4321, '4,321 s')],
)
def test_short_times_have_three_digits(seconds, shown):
    assert amounts.short_time(seconds) == shown
