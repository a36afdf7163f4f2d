"""What figures do about values far out, and about curves that a line of text says as well."""

import math

import pytest

from chromium import needs_chromium
from pretrax.page_kit import KIT, script_text

pytestmark = needs_chromium
FALLING = [2 + 5 * math.exp(-step / 70) for step in range(400)]
NOISY = [0.5 + 0.1 * math.sin(step) for step in range(400)]


@pytest.fixture(scope='module')
def plots(browser):
    """Calls a function of plots.js."""
    page = browser.new_page()
    page.set_content('<body></body>')
    script = script_text(KIT / 'plots.js')
    page.add_script_tag(content=f'{script}\nObject.assign(window, {{ clipped, inWords }});', type='module')
    page.wait_for_function('Boolean(window.clipped)')

    def call(name, *arguments):
        return page.evaluate('([name, values]) => window[name](...values)', [name, list(arguments)])

    yield call
    page.close()


def curve(values, first=0):
    return {'x': list(range(first, first + len(values))), 'y': values}


def with_spikes(values, spikes):
    return [spikes.get(step, value) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ('curves', 'outside', 'at', 'words'),
    [
        ([with_spikes(FALLING, {240: 58000.0})], 1, [240], ['1 point outside, at 58,000']),
        ([with_spikes(FALLING, {240: 58000.0, 241: 900.0})], 2, [240], ['2 points outside, up to 58,000']),
        ([with_spikes(NOISY, {9: 1e6, 300: -1e6})], 2, [300, 9], ['1 point outside, at -1,000,000', None]),
        ([FALLING, FALLING, FALLING, FALLING, [1e4 + v for v in FALLING]], 400, [0], None),  # one run of five diverged
    ],
)
def test_values_far_out_are_marked_at_their_places_and_do_not_flatten_the_others(plots, curves, outside, at, words):
    found = plots('clipped', [curve(values) for values in curves])
    assert found['outside'] == outside
    assert [trace['x'][0] for trace in found['traces']] == at
    low, high = found['range']
    others = [v for values in curves for v in values if abs(v) < 100]
    assert low < min(others) < max(others) < high < max(others) + 0.1 * (max(others) - min(others))
    for text, annotation in zip(words or [], found['annotations'], strict=False):
        assert text is None or annotation['text'] == text


@pytest.mark.parametrize(
    'curves',
    [
        [FALLING],  # the beginning of a loss is no outlier
        [[10.8, *FALLING], FALLING[::40]],
        [NOISY],
        [[0.0] * 300 + [1.0] * 3 + [0.0] * 97],  # nothing but the steps of a count would be left
        [[1.5]],
        [[math.nan, 2.0, 3.0]],
        [[]],
    ],
)  # fmt: skip
def test_a_curve_without_values_far_out_is_drawn_whole(plots, curves):
    assert plots('clipped', [curve(values) for values in curves]) is None


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ([0.5] * 9, 'constant at 0.5'),
        ([4096.0 * step for step in range(1, 9)], 'a straight line from 4,096 to 32,768'),
        ([3.25], '3.25 at step 7'),
        ([math.nan], 'no number that is finite'),
        ([0.5] * 8 + [0.5001], ''),
        ([0.5, math.nan, 0.5], ''),  # what is not finite must be seen
        (FALLING, ''),
        ([1.0, 2.0], ''),
    ],
)
def test_a_constant_and_a_straight_line_are_said_in_words(plots, values, words):
    assert plots('inWords', list(range(7, 7 + len(values))), values, False) == words


def test_fractions_are_in_percent(plots):
    assert plots('inWords', [1, 2, 3], [0.31] * 3, True) == 'constant at 31 %'
