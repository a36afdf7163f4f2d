"""The chat page in a real Chromium, with a small server that streams what a test tells it to."""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

import page_stub
from chromium import needs_chromium, observe
from page_stub import Stub, running

pytestmark = needs_chromium

expect.set_options(timeout=60_000)

HOSTILE = '<script>window.broken = 1</script><img src=x onerror="window.broken = 1"> \u202eevil\u202c &amp; \u2066'


class Visit:
    """A fresh browser profile, everything that its page asks for, and everything that goes wrong in it."""

    def __init__(self, browser: Browser):
        self.context = browser.new_context(viewport={'width': 1280, 'height': 800}, reduced_motion='reduce')
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.requested, self.problems = observe(self.page, ('error',))

    def open(self, address: str, name: str = 'tiny') -> Page:
        self.page.goto(address)
        expect(self.page.get_by_role('heading', name=name, exact=True)).to_be_visible()
        return self.page


@pytest.fixture
def visit(browser):
    """A visit of the page, which must make no error and send nothing to another server."""
    made = Visit(browser)
    yield made
    made.context.close()
    assert not made.problems
    assert len({url.split('/')[2] for url in made.requested if not url.startswith('data:')}) == 1


@pytest.fixture
def careless_visit(browser):
    """A visit in a test that provokes errors of the network."""
    made = Visit(browser)
    yield made
    made.context.close()


@pytest.fixture
def serve():
    """Starts a server with a stub; returns its address."""
    with contextlib.ExitStack() as stack:
        yield lambda stub: stack.enter_context(running(stub))


@pytest.fixture
def base(serve, visit) -> tuple[Stub, Page]:
    """A base model, and its page."""
    stub = Stub()
    return stub, visit.open(serve(stub))


@pytest.fixture
def chat(serve, visit) -> tuple[Stub, Page]:
    """A model with a chat template, and its page."""
    stub = Stub(chat=True)
    stub.answers = [['Good', ' morning']]
    return stub, visit.open(serve(stub))


def text_of(page: Page):
    return page.get_by_role('textbox', name='Text that the model continues')


def button(page: Page, name: str):
    return page.get_by_role('button', name=name, exact=True)


def write(page: Page, words: str) -> None:
    """Writes words and has the model continue them to the end."""
    text_of(page).fill(words)
    page.keyboard.press('Control+Enter')
    expect(page.locator('#facts-of-answer')).to_contain_text('token limit')


def ask(page: Page, words: str) -> None:
    """Sends a message of a chat and waits for the end of the answer."""
    page.get_by_role('textbox', name='Message').fill(words)
    page.keyboard.press('Enter')
    expect(page.get_by_role('article').last).to_contain_text('token limit')
    expect(button(page, 'Stop')).to_be_hidden()


def messages(page: Page) -> list[str]:
    return page.locator('article .words').all_text_contents()


def test_a_text_is_continued_while_it_arrives(base):
    stub, page = base
    stub.gate.clear()
    text_of(page).fill('Once upon a time')
    page.keyboard.press('Control+Enter')
    expect(page.locator('.run.model')).to_have_text(' and')
    expect(button(page, 'Stop')).to_be_visible()
    stub.gate.set()
    expect(text_of(page)).to_have_value('Once upon a time and they lived happily')
    expect(page.locator('.run.you')).to_have_text('Once upon a time')
    expect(page.locator('.run.model')).to_have_text(' and they lived happily')
    expect(page.get_by_role('status')).to_have_text('and they lived happily')
    expect(page.locator('#facts-of-answer')).to_have_text(
        re.compile(r'4 tokens · [\d,]+ tokens/s · step 12,000 · token limit')
    )
    assert [asked['prompt'] for asked in stub.asked] == ['Once upon a time']


@pytest.mark.parametrize('escapes', [False, True])
def test_a_text_that_is_sent_before_the_server_answers_waits_for_it(base, escapes):
    stub, page = base
    stub.doors.clear()
    page.reload()
    expect(page.get_by_role('heading', name='Connecting…')).to_be_visible()
    text_of(page).fill('Once')
    page.keyboard.press('Control+Enter')
    expect(page.get_by_role('status')).to_have_text('The text is sent when the server answers.')
    if escapes:
        page.keyboard.press('Escape')
    stub.doors.set()
    expect(page.get_by_role('heading', name='tiny', exact=True)).to_be_visible()
    if escapes:
        expect(button(page, 'Continue')).to_be_enabled()
        assert not stub.asked
        page.keyboard.press('Control+Enter')
    expect(text_of(page)).to_have_value('Once and they lived happily')
    assert len(stub.asked) == 1


def test_escape_stops_and_the_text_so_far_is_continued(base):
    stub, page = base
    stub.gate.clear()
    text_of(page).fill('Once')
    page.keyboard.press('Control+Enter')
    expect(page.locator('.run.model')).to_have_text(' and')
    page.keyboard.press('Escape')
    expect(page.locator('#facts-of-answer')).to_contain_text('stopped')
    assert stub.cancelled.wait(15)
    stub.gate.set()
    page.keyboard.press('Control+Enter')
    expect(text_of(page)).to_have_value('Once and and they lived happily')
    assert stub.asked[-1]['prompt'] == 'Once and'


def test_a_character_may_be_torn_between_tokens_and_packets(base):
    stub, page = base
    stub.answers = [[' a', '|👩🏽‍🚀', ' é', '\r\n', '日本', '|🙂', '\n', '']]
    write(page, 'An emoji 🙂:')
    expect(text_of(page)).to_have_value('An emoji 🙂: a👩🏽‍🚀 é\n日本🙂\n')
    assert page.locator('.token').all_text_contents() == [' a', '👩🏽‍🚀', ' é', '\n', '日本', '🙂', '\n']
    page.locator('.token', has_text='👩🏽‍🚀').hover(force=True)
    expect(page.locator('#token table')).to_have_count(2)  # both tokens


def test_a_chat_finds_the_text_of_each_token(chat):
    stub, page = chat
    stub.answers = [['Hi', ' <eos>', '|👩🏽‍🚀', '  é', '日本', '.']]
    ask(page, 'Hello')
    assert page.locator('.by-model .token').all_text_contents() == ['Hi', ' <eos>', '👩🏽‍🚀', '  é', '日本', '.']


@pytest.mark.parametrize('mode', ['base', 'chat'])
def test_text_is_never_html(mode, request):
    stub, page = request.getfixturevalue(mode)
    stub.answers = [['<script>', 'window.broken = 1</script>', HOSTILE]]
    stub.name = HOSTILE
    page.reload()
    (write if mode == 'base' else ask)(page, HOSTILE)
    whole = HOSTILE + '<script>window.broken = 1</script>' + HOSTILE
    shown = page.locator('.mirror' if mode == 'base' else '#thread').text_content() or ''
    assert whole.removeprefix(HOSTILE) in shown
    assert shown.count('<img src=x') == 2 + (mode == 'chat')  # and the name of the model
    page.locator('.token').first.hover(force=True)
    expect(page.locator('#token')).to_contain_text('<U+202E>')
    page.reload()
    expect(page.locator('nav li')).to_have_count(1)
    assert page.evaluate('window.broken') is None
    assert page.locator('main script, main img, nav li img, #token img').count() == 0


def test_a_reload_keeps_the_text_its_tokens_and_the_settings(base):
    _, page = base
    write(page, 'Once')
    button(page, 'Settings').click()
    page.get_by_label('Temperature').fill('0.3')
    page.reload()
    expect(text_of(page)).to_have_value('Once and they lived happily')
    expect(page.locator('.token')).to_have_count(4)
    expect(page.locator('input[name=temperature]')).to_have_value('0.3')
    button(page, 'New text').click()
    expect(text_of(page)).to_have_value('')
    button(page, 'Once and they lived happily').click()
    expect(text_of(page)).to_have_value('Once and they lived happily')
    button(page, 'Delete “Once and they lived happily”').click()
    expect(text_of(page)).to_have_value('')
    button(page, 'Undo').click()
    expect(text_of(page)).to_have_value('Once and they lived happily')
    button(page, 'Delete “Once and they lived happily”').click()
    page.reload()
    expect(text_of(page)).to_have_value('')


def test_a_reload_keeps_what_was_just_typed(base):
    _, page = base
    text_of(page).fill('Once upon')
    page.reload()
    expect(text_of(page)).to_have_value('Once upon')


@pytest.mark.slow
def test_a_full_storage_loses_probabilities_but_no_text(base):
    stub, page = base
    stub.answers = [[f' {number}' for number in range(100)]]
    write(page, 'First')
    page.evaluate("""() => {
        let size = 1 << 22;
        for (let i = 0; size > 512; i++) {
            try { localStorage.setItem(`junk${i}`, 'x'.repeat(size)); } catch { size >>= 1; }
        }
    }""")
    button(page, 'New text').click()
    write(page, 'Second')
    page.reload()
    expect(text_of(page)).to_have_value(re.compile('^Second 0.* 99$'))
    page.locator('nav .saved', has_text='First').click()
    expect(text_of(page)).to_have_value(re.compile('^First 0.* 99$'))
    expect(page.locator('.token')).to_have_count(0)


def test_a_reload_in_the_middle_keeps_what_was_written(base):
    stub, page = base
    stub.gate.clear()
    text_of(page).fill('Once')
    page.keyboard.press('Control+Enter')
    expect(page.locator('.run.model')).to_have_text(' and')
    page.reload()
    expect(text_of(page)).to_have_value('Once and')


def test_a_lost_server_leaves_the_text_and_comes_back(careless_visit):
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, page_stub.__file__, str(port)]

    @contextlib.contextmanager
    def killed_at_the_end(*options: str) -> Iterator[None]:
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                assert process.stdout.readline() == 'ready\n'
                yield
            finally:
                process.kill()

    with killed_at_the_end('--halt'):
        page = careless_visit.open(f'http://127.0.0.1:{port}')
        text_of(page).fill('Once')
        page.keyboard.press('Control+Enter')
        expect(page.locator('.run.model')).to_have_text(' and')
    banner = page.get_by_role('alert')
    expect(banner).to_contain_text('server')
    expect(text_of(page)).to_have_value('Once and')
    with killed_at_the_end():
        expect(banner).to_contain_text('The server is back.')
        button(page, 'Go on').click()
        expect(text_of(page)).to_have_value('Once and and they lived happily')
        expect(banner).to_be_empty()


def test_regenerate_writes_another_version(base):
    stub, page = base
    stub.answers = [[' one'], [' two']]
    write(page, 'Number')
    button(page, 'Regenerate').click()
    expect(text_of(page)).to_have_value('Number two')
    assert [asked['prompt'] for asked in stub.asked] == ['Number', 'Number']
    expect(page.locator('#version')).to_have_text('2 of 2')
    button(page, 'Previous version').click()
    expect(text_of(page)).to_have_value('Number one')
    expect(button(page, 'Previous version')).to_be_disabled()
    page.reload()
    expect(text_of(page)).to_have_value('Number one')
    expect(page.locator('#version')).to_have_text('1 of 2')


def test_an_edit_of_earlier_words_is_a_new_version(base):
    stub, page = base
    stub.answers = [[' and', ' they', ' lived'], [' still']]
    write(page, 'Once')
    text_of(page).fill('Twice and they lived')
    text_of(page).fill('Twice and they walked')
    assert page.locator('.run').all_text_contents() == ['Twice', ' and they ', 'walk', 'ed']
    assert page.locator('.token').all_text_contents() == [' and', ' they']
    page.keyboard.press('Control+Enter')
    expect(text_of(page)).to_have_value('Twice and they walked still')
    assert stub.asked[-1]['prompt'] == 'Twice and they walked'
    button(page, 'Previous version').click()
    expect(text_of(page)).to_have_value('Once and they lived')
    text_of(page).fill('Once and they lived here')  # at the end: the same version
    page.keyboard.press('Control+Enter')
    expect(text_of(page)).to_have_value('Once and they lived here still')
    expect(page.locator('#version')).to_have_text('1 of 2')


def test_an_edited_message_of_a_chat_starts_a_branch(chat):
    stub, page = chat
    ask(page, 'Hello')
    ask(page, 'How are you?')
    stub.answers = [['Moin']]
    page.get_by_role('article', name='Message of You').first.get_by_role('button', name='Edit').click()
    page.locator('form.editing textarea').fill('Hallo')
    page.keyboard.press('Control+Enter')
    expect(page.locator('article')).to_have_count(2)
    expect(page.get_by_role('article').last).to_contain_text('token limit')
    assert messages(page) == ['Hallo', 'Moin']
    assert stub.asked[-1]['messages'] == [{'role': 'user', 'content': 'Hallo'}]
    branches = page.get_by_role('group', name='Versions of this message')
    expect(branches).to_contain_text('2 of 2')
    button(page, 'Previous version').click()
    assert messages(page) == ['Hello', 'Good morning', 'How are you?', 'Good morning']
    button(page, 'Regenerate').first.click()
    expect(page.get_by_role('article').last).to_contain_text('token limit')
    assert messages(page) == ['Hello', 'Moin']
    expect(branches.last).to_contain_text('2 of 2')


def test_a_chat_sends_every_message_and_the_system_prompt(chat):
    stub, page = chat
    ask(page, 'Hello')
    button(page, 'Settings').click()
    page.get_by_label('System prompt').fill('Be kind.')
    ask(page, 'And\n< now >')
    assert stub.asked[-1]['messages'] == [
        {'role': 'system', 'content': 'Be kind.'},
        {'role': 'user', 'content': 'Hello'},
        {'role': 'assistant', 'content': 'Good morning'},
        {'role': 'user', 'content': 'And\n< now >'},
    ]
    page.get_by_text('Text', exact=True).click()  # such a model continues texts too
    write(page, 'Once')
    assert stub.asked[-1]['prompt'] == 'Once'


def test_the_keyboard_shows_the_probabilities_of_a_text(base):
    _, page = base
    write(page, 'Once')
    text_of(page).focus()
    page.keyboard.press('Control+Home')
    expect(page.locator('#token')).to_be_hidden()
    for _ in 'Once':
        page.keyboard.press('ArrowRight')
    panel = page.get_by_role('tooltip')
    expect(panel).to_contain_text('␣and')
    expect(panel).to_contain_text('62.0 %')
    expect(panel.locator('.chosen')).to_contain_text('␣and')
    expect(page.get_by_role('status')).to_contain_text('␣dog')
    page.keyboard.press('Escape')
    expect(panel).to_be_hidden()


def test_the_keyboard_shows_the_probabilities_of_an_answer(chat):
    _, page = chat
    ask(page, 'Hello')
    page.get_by_role('group', name='Written text').focus()
    page.keyboard.press('ArrowRight')
    page.keyboard.press('ArrowRight')
    expect(page.get_by_role('tooltip').locator('.chosen')).to_contain_text('␣morning')
    page.keyboard.press('ArrowLeft')
    expect(page.get_by_role('tooltip').locator('.chosen')).to_contain_text('Good')


def test_the_pointer_shows_probabilities_and_unlikely_tokens_can_be_marked(base):
    _, page = base
    write(page, 'Once')
    box = page.locator('.token').nth(3).bounding_box()
    assert box
    page.mouse.move(box['x'] + box['width'] / 2, box['y'] + box['height'] / 2)
    expect(page.get_by_role('tooltip').locator('.chosen')).to_contain_text('12.0 %')
    button(page, 'Settings').click()
    page.get_by_label('Mark unlikely tokens').check()
    lines = page.locator('.token').evaluate_all('all => all.map(one => getComputedStyle(one).textDecorationStyle)')
    assert lines == ['dotted', 'solid', 'dashed', 'solid']  # not by color alone; the second one has no line
    page.get_by_label('Show on hover').uncheck()
    page.mouse.move(box['x'] + 3, box['y'] + 3)
    expect(page.get_by_role('tooltip')).to_be_hidden()


@pytest.mark.parametrize('device', ['pointer', 'keyboard'])
def test_another_token_can_be_chosen(base, device):
    stub, page = base
    write(page, 'Once')
    stub.answers = [[' barked']]
    if device == 'pointer':
        page.locator('.token').nth(1).click(force=True)
    else:
        text_of(page).focus()
        page.keyboard.press('Control+Home')
        for _ in 'Once and':
            page.keyboard.press('ArrowRight')
        page.keyboard.press('Alt+ArrowDown')
    choice = page.get_by_role('dialog', name='Choose another token')
    if device == 'pointer':
        expect(text_of(page)).to_be_focused()  # a click may also be the beginning of an edit
        choice.get_by_text('␣dog').click()
    else:
        expect(choice.get_by_role('button').first).to_be_focused()
        page.keyboard.press('Enter')
    expect(text_of(page)).to_have_value('Once and dog barked')
    assert stub.asked[-1]['prompt'] == 'Once and dog'
    assert page.locator('.token').all_text_contents() == [' and', ' dog', ' barked']
    button(page, 'Previous version').click()
    expect(text_of(page)).to_have_value('Once and they lived happily')


def test_settings_are_sent_and_what_is_off_is_not(base):
    stub, page = base
    write(page, 'Once')
    assert stub.asked[-1] == {
        'model': 'tiny', 'prompt': 'Once', 'temperature': 0.8, 'max_tokens': 256, 'logprobs': 5,
        'stream': True, 'stream_options': {'include_usage': True},
    }  # fmt: skip
    button(page, 'Settings').click()
    wanted = {
        'Temperature': '0', 'Max tokens': '9', 'Top-p': '0.9', 'Top-k': '40', 'Min-p': '0.05', 'Seed': '7',
        'Repetition penalty': '1.1', 'Presence penalty': '-0.5', 'Frequency penalty': '0.25',
        'Stop strings': '\\n\\n\nEnd.',
    }  # fmt: skip
    for label, value in wanted.items():
        page.get_by_label(label).fill(value)
    page.get_by_label('Show on hover').uncheck()
    text_of(page).focus()
    write(page, 'Once')
    assert stub.asked[-1] == {
        'model': 'tiny', 'prompt': 'Once', 'temperature': 0, 'max_tokens': 9, 'top_p': 0.9, 'top_k': 40, 'min_p': 0.05,
        'seed': 7, 'repetition_penalty': 1.1, 'presence_penalty': -0.5, 'frequency_penalty': 0.25, 'stop': ['\n\n',
        'End.'],
        'stream': True, 'stream_options': {'include_usage': True},
    }  # fmt: skip
    button(page, 'Back to the defaults').click()
    expect(page.get_by_label('Max tokens')).to_have_value('256')


def test_two_servers_continue_one_text_side_by_side(serve, careless_visit):
    first, second = Stub(), Stub(name='other')
    second.answers = [[' not']]
    address, other = serve(first), serve(second)
    first.origin, second.origin = other, address
    page = careless_visit.open(address)
    button(page, 'Compare').click()
    page.get_by_label('Server').fill(other)
    page.get_by_label('Server').press('Tab')
    expect(page.locator('select[name=other_model]')).to_have_value('other')
    write(page, 'Once')
    assert [asked['prompt'] for asked in first.asked + second.asked] == ['Once', 'Once']
    expect(text_of(page)).to_have_value('Once and they lived happily')
    expect(page.locator('.mirror')).to_have_text('Once and they lived happily\u200b')
    expect(page.locator('#second-text')).to_have_text('Once not')
    expect(page.locator('#second-name')).to_contain_text('other')
    button(page, 'Go on with this text').click()
    expect(text_of(page)).to_have_value('Once not')
    assert not careless_visit.problems
    assert {url.split('/')[2] for url in careless_visit.requested} == {address[7:], other[7:]}


def test_two_servers_answer_one_message_side_by_side(serve, careless_visit):
    first, second = Stub(chat=True), Stub(chat=True, name='other')
    second.answers = [['No']]
    address, other = serve(first), serve(second)
    first.origin, second.origin = other, address
    page = careless_visit.open(address)
    button(page, 'Compare').click()
    page.get_by_label('Server').fill(other)
    expect(page.locator('select[name=other_model]')).to_have_value('other')
    ask(page, 'Well?')
    assert messages(page) == ['Well?', ' and they lived happily', 'No']
    button(page, 'Go on with this answer').click()
    expect(page.get_by_role('article')).to_have_count(2)
    ask(page, 'Really?')
    assert [said['content'] for said in second.asked[-1]['messages']] == ['Well?', 'No', 'Really?']
    assert [said['content'] for said in first.asked[-1]['messages']] == ['Well?', 'No', 'Really?']


def test_a_second_server_that_may_not_be_asked_is_explained(serve, careless_visit):
    page = careless_visit.open(serve(Stub()))
    other = serve(Stub())
    button(page, 'Compare').click()
    page.get_by_label('Server').fill(other)
    expect(page.get_by_role('alert')).to_contain_text(f'with --allow-origin {other}')


def test_a_key_is_asked_for_and_kept_in_the_tab(serve, careless_visit):
    stub = Stub(key='secret')
    page = careless_visit.page
    page.goto(serve(stub))
    for key in ('wrong', 'secret'):
        expect(page.get_by_role('dialog', name='API key')).to_contain_text('wrong API key')
        page.get_by_label('Key', exact=True).fill(key)
        button(page, 'Connect').click()
    expect(page.get_by_role('heading', name='tiny', exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_role('heading', name='tiny', exact=True)).to_be_visible()
    write(page, 'Once')
    assert 'secret' not in page.evaluate('JSON.stringify(localStorage)')


def test_a_refused_request_is_explained_and_can_be_tried_again(serve, careless_visit):
    stub = Stub()
    page = careless_visit.open(serve(stub))
    stub.error = {'status': 400, 'message': 'stop: expected at most 16', 'code': 'invalid_value'}
    text_of(page).fill('Once')
    page.keyboard.press('Control+Enter')
    expect(page.get_by_role('alert')).to_contain_text('stop: expected at most 16')
    expect(text_of(page)).to_have_value('Once')
    button(page, 'Try again').click()
    expect(text_of(page)).to_have_value('Once and they lived happily')


@pytest.mark.parametrize(
    ('mode', 'words', 'settings', 'most', 'read'),
    [
        ('text', 'Once', {}, 252, None),  # not the 256 of the defaults
        ('text', 'x' * 100, {}, 156, None),
        ('text', 'x' * 200, {}, 128, 128),  # no quarter of the positions is left: the first half is not read
        ('text', 'x' * 1000, {'max_tokens': '9'}, 9, 128),
        ('text', 'x' * 240, {'max_tokens': '9'}, 9, None),
        ('chat', 'x' * 240, {}, 16, None),
    ],
)
def test_a_model_is_asked_for_as_many_tokens_as_fit(mode, words, settings, most, read, serve, visit):
    """`visit` fails if a request is refused."""
    stub = Stub(chat=mode == 'chat', max_length=256)
    visit.context.add_init_script(f'localStorage.setItem("pretrax.settings", {json.dumps(json.dumps(settings))})')
    page = visit.open(serve(stub))
    (ask if mode == 'chat' else write)(page, words)
    [asked] = stub.asked
    assert asked['max_tokens'] == most
    expected = words if read is None else list(words[-read:].encode())
    assert (asked['messages'][0]['content'] if mode == 'chat' else asked['prompt']) == expected
    if read:
        expect(page.locator('#facts-of-answer')).to_contain_text(f'after the last {read} tokens')


@pytest.mark.parametrize('mode', ['base', 'chat'])
def test_an_empty_page_offers_what_to_begin_with(mode, request):
    stub, page = request.getfixturevalue(mode)
    box = text_of(page) if mode == 'base' else page.get_by_role('textbox', name='Message')
    example = page.locator('.example').first
    words = example.inner_text()
    example.click()
    assert box.input_value().startswith(words)
    assert stub.asked == []  # it can be changed before it is sent
    page.keyboard.press('Control+Enter')
    expect(page.get_by_text('token limit')).to_be_visible()
    assert words in json.dumps(stub.asked[-1])
    expect(page.locator('.example:visible')).to_have_count(0)


def test_an_answer_of_a_chat_is_continued(chat):
    stub, page = chat
    ask(page, 'Hello')
    stub.answers = [[',', ' Ann']]
    button(page, 'Continue').click()
    expect(page.locator('.by-model .facts')).to_have_text(re.compile(r'^4 tokens \u00b7 .*token limit'))
    assert messages(page) == ['Hello', 'Good morning, Ann']
    assert page.locator('.by-model .token').all_text_contents() == ['Good', ' morning', ',', ' Ann']
    asked = stub.asked[-1]
    assert asked['messages'][-1] == {'role': 'assistant', 'content': 'Good morning'}
    assert (asked['continue_final_message'], asked['add_generation_prompt']) == (True, False)
    expect(page.get_by_role('group', name='Versions of this message')).to_have_count(0)

    stub.answers = [[' day']]  # another token in place of one that was written
    page.locator('.token').nth(1).click()
    page.get_by_role('dialog', name='Choose another token').get_by_text('\u2423dog').click()
    expect(page.locator('.by-model .words')).to_have_text('Good dog day')
    assert stub.asked[-1]['messages'][-1]['content'] == 'Good dog'
    expect(page.get_by_role('group', name='Versions of this message')).to_contain_text('2 of 2')


def test_texts_and_answers_are_copied(serve, visit):
    visit.context.grant_permissions(['clipboard-read', 'clipboard-write'])
    page = visit.open(serve(Stub(chat=True)))
    ask(page, 'Hello')
    button(page, 'Copy').last.click()
    expect(button(page, 'Copied')).to_be_visible()
    assert page.evaluate('navigator.clipboard.readText()') == ' and they lived happily'
    page.get_by_text('Text', exact=True).click()
    write(page, 'Once')
    page.evaluate(
        'Object.defineProperty(navigator, "clipboard", { value: undefined })'
    )  # as over http from another machine
    button(page, 'Copy').click()
    expect(button(page, 'Copied')).to_be_visible()
    text_of(page).press('Control+a')
    page.keyboard.press('Control+v')
    expect(text_of(page)).to_have_value('Once and they lived happily')


def test_programs_are_monospaced_and_prose_is_not(chat):
    stub, page = chat
    stub.answers = [['So', ':', '\n\n', '``', '`', 'py', '\nx', ' = 1', '\n```', '\n\n', 'Done', '.']]
    ask(page, 'How?')
    assert page.locator('.fenced').all_text_contents() == ['```py\nx = 1\n```\n\n']
    font = 'one => getComputedStyle(one).fontFamily.includes("monospace")'
    assert page.locator('.by-model .token').evaluate_all(f'all => all.map({font})') == [
        *[False] * 3,
        *[True] * 7,
        *[False] * 2,
    ]
    page.get_by_text('Text', exact=True).click()
    for words, is_code in {
        'def f(': True,
        'class A:\n    pass': True,
        'import os\n\nfor x in y:': True,
        'int main() {\n  return 0;\n}': True,
        'Once upon a time\nthere was a cat.': False,
        'The class was over.': False,
        'def': True,
        'Return to me.\nFor ever, if you can:': False,
    }.items():
        text_of(page).fill(words)
        assert text_of(page).evaluate(font) == is_code, words
    button(page, 'Settings').click()
    page.get_by_label('Font').select_option('mono')
    assert text_of(page).evaluate(font)


def test_a_chat_that_fills_the_positions_is_refused_with_the_words_of_the_server(serve, careless_visit):
    page = careless_visit.open(serve(Stub(chat=True, max_length=256)))
    page.get_by_role('textbox', name='Message').fill('x' * 300)
    page.keyboard.press('Enter')
    expect(page.get_by_role('alert')).to_contain_text('Too long')


@pytest.mark.parametrize('mode', ['base', 'chat'])
def test_dark_and_small_screens(mode, request):
    _, page = request.getfixturevalue(mode)
    (write if mode == 'base' else ask)(page, 'Long ' + 'word' * 60)
    ground = 'getComputedStyle(document.documentElement).backgroundColor'
    light = page.evaluate(ground)
    page.emulate_media(color_scheme='dark')
    dark = page.evaluate(ground)
    assert dark != light
    page.get_by_label('Theme').select_option('light')
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light

    wide = 'document.documentElement.scrollWidth > document.documentElement.clientWidth'
    for width in (1400, 768, 390, 320):
        page.set_viewport_size({'width': width, 'height': 600})
        assert not page.evaluate(wide), width
    button(page, 'Compare').click()
    assert not page.evaluate(wide)
    expect(page.get_by_label('Server')).to_be_visible()
    page.keyboard.press('Escape')
    button(page, 'Saved texts').click()
    expect(button(page, 'New text' if mode == 'base' else 'New chat')).to_be_visible()
    assert not page.evaluate(wide)
    page.locator('nav .saved').click()
    expect(page.get_by_role('navigation')).to_be_hidden()


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['base', 'chat'])
def test_the_page_is_accessible(mode, request):
    _, page = request.getfixturevalue(mode)
    (write if mode == 'base' else ask)(page, 'Once')
    button(page, 'Regenerate').click()
    expect(page.locator('.versions:visible')).to_contain_text('2 of 2')
    button(page, 'Settings').click()
    page.get_by_label('Mark unlikely tokens').check()
    for scheme in ('light', 'dark'):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page, options={'resultTypes': ['violations']})
        assert not found.violations_count, found.generate_report()


CONTRASTS = """() => {
    const light = color => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    return [...document.querySelectorAll('.mirror .run, .mirror .token')].map(one => {
        let ground = one;
        while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
        const [a, b] = [light(getComputedStyle(one).color), light(getComputedStyle(ground).backgroundColor)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""


def test_written_text_has_enough_contrast(base):
    stub, page = base
    stub.answers = [['a', 'b', 'c', 'd', 'e']]  # a token of each probability
    write(page, 'Once')
    button(page, 'Settings').click()
    for scheme in ('light', 'dark'):
        page.emulate_media(color_scheme=scheme)
        for marked in (False, True):
            page.get_by_label('Mark unlikely tokens').set_checked(marked)
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) == 7
            assert min(contrasts) >= 4.5


def test_the_real_server_serves_the_page(server, visit):
    page = visit.page
    answer = page.goto(server.url)
    assert answer
    policy = answer.headers['content-security-policy']
    assert "default-src 'self'" in policy
    assert 'unsafe' not in policy
    write(page, 'Once')
    assert len(page.locator('.run.model').text_content() or '') > 100
    button(page, 'New text').click()
    page.get_by_role('combobox', name='Model').first.select_option('stub-chat')
    ask(page, 'Hello 🙂')
    expect(page.locator('.by-model h2')).to_have_text('stub-chat')
    expect(page.locator('.by-model .facts')).to_contain_text('step 100')


def test_the_first_tab_stop_skips_to_the_text(base):
    _, page = base
    page.locator('body').press('Tab')
    skip = page.get_by_role('link', name='Skip to the text')
    expect(skip).to_be_focused()
    skip.press('Enter')
    page.keyboard.press('Tab')
    expect(text_of(page)).to_be_focused()
