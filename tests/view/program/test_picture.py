"""The page of a program in Chromium, and the SVG file of the whole."""

import gzip
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from playwright.sync_api import expect

from chromium import needs_chromium, observe
from pretrax.hlo.program import parse_program
from pretrax.view.program.picture import page_of, svg_of

PROGRAMS = Path(__file__).parents[2] / 'hlo' / 'programs'
HOSTILE = '<script>window.broken = 1</script><img src=x onerror="window.broken = 1">'
SVG = '{http://www.w3.org/2000/svg}'


def program(name: str = 'tpu', **changes: str):
    text = gzip.decompress((PROGRAMS / f'{name}.hlo.txt.gz').read_bytes()).decode()
    for old, new in changes.items():
        text = text.replace(old, new)
    return parse_program(text)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page from a file without a network. It must ask for nothing else, and make no error."""
    context = browser.new_context(viewport={'width': 1400, 'height': 900}, offline=True)
    context.set_default_timeout(60_000)
    page = context.new_page()
    requested, problems = observe(page)

    def open_page(content: str):
        (tmp_path / 'program.html').write_text(content)
        page.goto((tmp_path / 'program.html').as_uri())
        page.locator('body[data-ready]').wait_for()
        return page

    yield open_page
    context.close()
    assert problems == []
    assert [url.rpartition('/')[2] for url in requested if not url.startswith('blob:')] == ['program.html']


def box(page, name: str):
    """The box whose first line is a name, which may be followed by figures."""
    return page.locator('#picture [data-id]').filter(
        has=page.locator(f':scope > text.name:text-matches("^[▸▾ ]*{name}( —|$)")')
    )


@needs_chromium
def test_groups_open_down_to_the_contents_of_a_fusion(opened):
    page = opened(page_of(program(), 'tiny', '4 x TPU v5 lite'))
    expect(page.get_by_role('heading', name='tiny', exact=True)).to_be_visible()
    expect(box(page, 'layer × 2')).to_have_count(2)  # forward and backward
    expect(box(page, 'layer × 2').first).to_have_class(re.compile('phase-forward'))
    expect(box(page, 'layer × 2').first).to_contain_text('all-gather over d')
    box(page, 'layer × 2').first.locator('> text.name').click()
    box(page, 'feed forward').first.locator('> text.name').click()
    fusion = page.locator('#picture .operation[role=button]').first
    name = fusion.locator('> text.name').text_content().strip('▸ ')
    fusion.locator('> rect').click()
    expect(page.locator('#panel')).to_contain_text('layer × 2 › feed forward')
    expect(page.locator('#panel')).to_contain_text('pretrax/model/mlp.py')
    expect(page.locator('#panel a[href="#definition-runs"]')).to_be_visible()
    page.get_by_role('button', name='Open the contents of the fusion').click()
    inside = {one.name for one in program().contents(program().operations[name])}
    shown = set(page.locator('#picture .operation.open > g > [data-id] > text.name').all_text_contents())
    assert shown == inside


@needs_chromium
def test_search_shows_a_hidden_operation(opened):
    page = opened(page_of(program(), 'tiny'))
    wanted = next(one for one in program().kernels() if one.collective and 'feed_forward' in one.scope)
    expect(page.locator('#picture').get_by_text(wanted.name, exact=True)).to_have_count(0)
    page.get_by_label('Search').fill(wanted.name)
    page.locator('#results button').filter(has_text=re.compile(f'^{re.escape(wanted.name)}$')).click()
    expect(page.locator('#picture .selected')).to_contain_text(wanted.name)
    expect(page.locator('#picture .selected')).to_have_class(re.compile('collective'))


@needs_chromium
def test_names_are_escaped(opened):
    hostile = {'feed_forward/': 'feed_<b>forward&/', 'pretrax/model/mlp.py': HOSTILE.replace('"', "'")}
    page = opened(page_of(program('gpu', **hostile), HOSTILE, HOSTILE))
    for _ in range(4):
        page.get_by_role('button', name='Open one level').click()
    expect(page.get_by_role('heading', name=HOSTILE)).to_be_visible()
    expect(page.locator('#picture')).to_contain_text('<b>forward&')
    page.get_by_label('Search').fill('onerror')
    page.locator('#results button').first.click()
    expect(page.locator('#panel')).to_contain_text('onerror')
    assert page.evaluate('window.broken') is None


@needs_chromium
def test_keys_open_and_close_a_group(opened):
    page = opened(page_of(program('gpu'), 'tiny'))
    layer = box(page, 'layer 0').first
    expect(layer).to_have_attribute('aria-expanded', 'false')
    layer.focus()
    page.keyboard.press('Enter')
    expect(box(page, 'layer 0').first).to_have_attribute('aria-expanded', 'true')
    page.keyboard.press('Enter')
    expect(box(page, 'layer 0').first).to_have_attribute('aria-expanded', 'false')


@needs_chromium
def test_the_saved_picture_is_that_of_the_page(opened, tmp_path):
    page = opened(page_of(program('gpu'), 'tiny'))
    with page.expect_download() as download:
        page.get_by_role('button', name='Save as SVG').click()
    root = ET.parse(download.value.path()).getroot()
    assert len(root.findall(f'.//{SVG}g[@data-id]')) == page.locator('#picture [data-id]').count()


def test_the_svg_file_shows_every_operation_in_its_group():
    shown = ET.fromstring(svg_of(program('gpu'), 'tiny <&>'))
    texts = [text.text or '' for text in shown.iter(f'{SVG}text')]
    names = {text.strip('▸ ') for text in texts}
    for one in program('gpu').kernels():
        assert one.name[:33] in names or f'{one.name[:33]}…' in names, one.name
    assert {f'{SVG}rect', f'{SVG}path', f'{SVG}text'} <= {element.tag for element in shown.iter()}
    assert any(text.startswith('▾ layer 0 — ') for text in texts)
    assert not list(shown.iter(f'{SVG}script'))
    left, top, width, height = map(float, shown.get('viewBox').split())
    assert width > 500
    assert height > 500
    assert left < 0 > top


def test_a_large_program_has_its_outer_groups_in_the_svg_file():
    boxes = ET.fromstring(svg_of(program('gpu'), 'tiny', most=30)).findall(f'.//{SVG}g[@data-id]')
    assert 10 < len(boxes) <= 30
