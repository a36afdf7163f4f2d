// The page: which model answers, which text is open, and what happens when somebody presses a button.

import { button, byId, element } from './dom.js';
import { Editor } from './editor.js';
import { examples } from './examples.js';
import { Aligner, grow, run, tokenAt, TokenPanel } from './runs.js';
import { askForKey, chooseTheme } from './served.js';
import { Server, ServerError } from './server.js';
import { Settings } from './settings.js';
import * as texts from './texts.js';
import { copyButton, inspectable, Thread } from './thread.js';

const SAVE_EVERY = 500; // milliseconds, while somebody writes

const here = new Server();
let models = [];
let second = null; // the other server of a comparison, and its models
let secondModels = [];
let text = null; // the open text or chat
let writing = null; // AbortController of the answers that are being written
let saving = 0; // timer
let asked = false; // somebody pressed Send before the server answered

const settings = new Settings(byId('settings').querySelector('form'), settingChanged);
const editor = new Editor(byId('editor'), edited);
const panel = new TokenPanel(byId('token'), chooseToken);
const thread = new Thread(byId('thread'), {
  edit: editMessage, regenerate: place => again(place), goOn, show: showVersion, facts, useSecond,
});

const model = () => models.find(({ id }) => id === byId('model').value) ?? models[0];
const chatting = () => text.mode === 'chat';

// --- The server ---

async function connect() {
  for (let wait = 1000; ; wait = Math.min(wait * 1.5, 15_000)) {
    try {
      models = await here.models();
      return true;
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (error.status === 401) {
        if (!await getKey(here, error.message)) return false;
        continue;
      }
      notify(`${error.message} The page tries again until it does.`);
      await new Promise(resolve => setTimeout(resolve, wait));
    }
  }
}

async function connectSecond() {
  second = settings.values.other ? new Server(settings.values.other) : here;
  try {
    secondModels = second === here ? models : await second.models();
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    secondModels = [];
    if (error.status === 401 && await getKey(second, error.message)) return connectSecond();
    notify(`${error.message} Start it with --allow-origin ${location.origin}, `
      + `and this page's server with --allow-origin ${second.url.origin}.`);
  }
  const choices = secondModels.map(({ id }) => element('option', { value: id }, id));
  byId('settings').querySelector('[name=other_model]').replaceChildren(...choices);
  const other = secondModels.find(({ id }) => id === settings.values.other_model)
    ?? secondModels.find(({ id }) => second !== here || id !== model()?.id);
  settings.form.elements.other_model.value = other?.id ?? '';
  settings.form.elements.other_model.disabled = secondModels.length < 2;
  render();
  return undefined;
}

/** Asks for the key of a server. Returns whether there is one. */
async function getKey(server, why) {
  const key = await askForKey(server.name ? `${server.name}: ${why}` : why);
  if (key === null) notify('This server needs an API key.', 'Enter the key', start);
  else server.key = key;
  return key !== null;
}

/** The model that answers beside the first one; null: there is none. */
function secondModel() {
  if (!settings.values.compare || !second) return null;
  const found = secondModels.find(({ id }) => id === settings.form.elements.other_model.value);
  return found && (second !== here || found.id !== model().id) ? found : null;
}

// --- Writing ---

async function write() {
  const own = text;
  texts.commit(text);
  const base = text.versions[text.current];
  const jobs = [answer(here, model(), text.current, base)];
  const other = chatting() && text.items[base.at(-1)].by === 'model' ? null : secondModel();
  text.second = null;
  if (other) {
    text.second = text.versions.push([...base]) - 1;
    jobs.push(answer(second, other, text.second, base));
  }
  notify('');
  panel.hide();
  thread.editing = null;
  render();
  say('The model writes.');
  const [error, secondError] = await Promise.all(jobs);
  writing = null;
  own.changed = Date.now();
  save(own);
  if (text !== own) return render();
  render();
  if (error?.status === 0) return waitForTheServer(error);
  const failed = error ?? secondError;
  if (failed?.status === 401) return await getKey(error ? here : second, failed.message) && goOn();
  if (failed) return notify(failed.message, 'Try again', goOn);
  say(texts.shown(text).at(-1)?.text ?? '');
  if (!chatting() && document.activeElement === document.body && matchMedia('(pointer: fine)').matches) editor.focusEnd();
  return undefined;
}

/**
 * Has a model answer `base`, at the end of a version; the last answer of a chat is continued. Returns undefined, or the error that
 * ended it.
 */
async function answer(server, asked, version, base) {
  const { id, step } = asked;
  writing ??= new AbortController();
  const { signal } = writing;
  const messages = base.map(item => text.items[item]);
  const name = server.name ? `${id} at ${server.name}` : id;
  const begun = chatting() && messages.at(-1).by === 'model' ? messages.at(-1) : { text: '' };
  const { tokens = [], count = 0, seconds = 0 } = begun;
  const item = texts.add(text, { ...begun, by: 'model', tokens: [...tokens], model: name, step, finish: null, count });
  const own = text;
  own.versions[version] = [...base.filter(number => number !== begun.id), item.id];
  const aligner = new Aligner(item);
  const started = performance.now();
  try {
    for await (const part of server.stream(asked, body(messages), signal)) {
      aligner.add(part.text, part.tokens, part.finish !== null);
      item.read ??= part.read;
      item.count = part.usage ? count + part.usage.completion_tokens : item.count + part.tokens.length;
      if (part.step !== null) item.step = asked.step = part.step;
      item.finish = part.finish ?? item.finish;
      item.seconds = seconds + (performance.now() - started) / 1000;
      growSoon(item);
      saveSoon(own);
    }
  } catch (error) {
    if (error.name === 'AbortError') item.finish = 'stopped';
    else if (error instanceof ServerError) {
      item.finish = 'lost';
      if (item.text === begun.text) own.versions[version] = base;
      return error;
    } else throw error;
  } finally {
    aligner.add('', [], true);
    grow(item);
  }
  return undefined;
}

const grown = new Set(); // items with words that are not shown yet

/** Shows new words with the next frame: many tokens may come in one. */
function growSoon(item) {
  if (!grown.size) {
    requestAnimationFrame(() => {
      keepingTheEndInView(() => grown.forEach(showGrown));
      grown.clear();
    });
  }
  grown.add(item);
}

function showGrown(item) {
  grow(item);
  if (chatting()) thread.grow(item);
  else if (item === texts.shown(text).at(-1)) byId('facts-of-answer').textContent = facts(item);
}

/** Keeps the end of the page in view if it was before `change`. */
function keepingTheEndInView(change) {
  const page = document.scrollingElement;
  const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}

function body(items) {
  const fields = settings.request(chatting());
  if (!chatting()) return { ...fields, prompt: texts.wordsOf(items) };
  if (items.at(-1).by === 'model') Object.assign(fields, { continue_final_message: true, add_generation_prompt: false });
  const messages = items.map(item => ({ role: item.by === 'you' ? 'user' : 'assistant', content: item.text }));
  if (settings.values.system) messages.unshift({ role: 'system', content: settings.values.system });
  return { ...fields, messages };
}

/** Writes another answer in place of the last one, or of the one at `place`, in a new version. */
function again(place) {
  texts.commit(text);
  const last = texts.shown(text).findLastIndex(item => item.by === 'model');
  const at = place ?? last;
  if (writing || at < 0) return;
  texts.fork(text, text.versions[text.current].slice(0, at));
  write();
}

/** Continues what was received. */
function goOn() {
  if (!writing) write();
}

async function waitForTheServer(error) {
  const own = text;
  notify(`${error.message} The text so far is kept.`, 'Try again', goOn);
  await connect();
  if (!writing && text === own) notify('The server is back.', 'Go on', goOn);
}

function send() {
  if (writing) return;
  asked = !models.length;
  if (asked) {
    say('The text is sent when the server answers.');
    return;
  }
  if (chatting() && !model().chat) {
    notify(`${model().id} is a base model: it has no chat template, and only continues texts.`, 'New text', () => newText('text'));
    return;
  }
  if (chatting()) {
    const words = byId('message').value;
    if (!words.trim()) return;
    byId('message').value = '';
    text.message = '';
    text.versions[text.current] = [...text.versions[text.current], texts.add(text, { by: 'you', text: words }).id];
  }
  write();
}

function stop() {
  asked = false;
  writing?.abort();
}

// --- Texts ---

function edited(value) {
  texts.edit(text, value);
  panel.hide();
  editor.show(texts.shown(text));
  text.changed = Date.now();
  saveSoon(text);
  renderTools();
  renderFont();
  renderExamples();
}

function editMessage(place, words) {
  const item = texts.shown(text)[place];
  if (words === item.text) return render();
  const before = text.versions[text.current].slice(0, place);
  texts.fork(text, [...before, texts.add(text, { by: item.by, model: item.model, text: words }).id]);
  if (item.by === 'you') return write();
  save();
  return render();
}

function showVersion(version) {
  texts.commit(text);
  text.current = version;
  save();
  render();
}

/** Continues the text with another token. */
function chooseToken(item, number, other) {
  panel.hide();
  texts.commit(text);
  const version = text.versions[text.current].includes(item.id) ? text.current : text.second;
  texts.replaceToken(text, text.versions[version], item, number, other);
  write();
  byId('stop').focus();
}

function useSecond() {
  showVersion(text.second);
  text.second = null;
  save();
  render();
}

function open(one) {
  stop();
  if (saving) save();
  if (small.matches && menuIsOpen()) toggleMenu(false);
  text = one;
  thread.editing = null;
  byId('message').value = text.message ?? '';
  notify('');
  render();
}

function newText(mode) {
  open(texts.create(mode ?? text?.mode ?? (model()?.chat ? 'chat' : 'text')));
  (chatting() ? byId('message') : byId('text')).focus();
}

function removeText({ id, title }) {
  const removed = id === text.id ? text : texts.load(id);
  texts.remove(id);
  if (removed === text) newText();
  else renderSaved();
  notify(`“${title || 'Untitled'}” is deleted.`, 'Undo', () => {
    save(removed);
    open(removed);
  });
}

function saveSoon(one) {
  saving ||= setTimeout(() => save(one), SAVE_EVERY);
}

function save(one = text) {
  clearTimeout(saving);
  saving = 0;
  if (texts.isEmpty(one)) return;
  if (!texts.save(one)) notify('The storage of this browser is full: this text is lost with the tab. Delete old texts.');
  renderSaved();
}

// --- What is shown ---

function render() {
  const one = model();
  byId('name').textContent = one?.id ?? 'Connecting…';
  const several = models.length > 1;
  byId('choose').hidden = !several;
  byId('name').classList.toggle('unseen', several);
  byId('facts').textContent = [
    one?.step != null && `step ${one.step.toLocaleString('en')}`,
    one?.maxLength && `context of ${one.maxLength.toLocaleString('en')} tokens`,
  ].filter(Boolean).join(' · ');
  document.title = one ? `${one.id} – pretrax` : 'pretrax';
  byId('mode').hidden = !one?.chat;
  for (const radio of document.getElementsByName('mode')) radio.checked = radio.value === text.mode;
  document.documentElement.dataset.mode = text.mode;
  document.documentElement.classList.toggle('colors', settings.values.colors);
  renderFont();
  renderExamples();
  byId('legend').hidden = !settings.values.colors;
  byId('new').textContent = chatting() ? 'New chat' : 'New text';
  byId('compare').ariaPressed = String(settings.values.compare);

  byId('document').hidden = chatting();
  byId('thread').hidden = !chatting();
  document.querySelector('.composer').hidden = !chatting();
  if (chatting()) thread.show(text, Boolean(writing));
  else {
    editor.show(texts.shown(text));
    editor.readOnly = Boolean(writing);
    renderSecond(one);
  }
  renderTools();
  renderSaved();
}

/** A program is monospaced, unless the settings say otherwise. */
function renderFont() {
  for (const font of ['mono', 'plain']) document.documentElement.classList.toggle(font, settings.values.font === font);
  byId('document').classList.toggle('code', texts.isCode(texts.wordsOf(texts.shown(text))));
}

/** Offers what to begin with while there is nothing. */
function renderExamples() {
  const isEmpty = texts.isEmpty(text) && !writing && models.length > 0;
  byId('examples').hidden = !isEmpty;
  byId('examples-title').textContent = chatting() ? 'Ask the model something' : 'Begin a text that the model continues';
  byId('example-list').replaceChildren(...isEmpty ? examples(text.mode, begin) : []);
}

function begin(words) {
  const box = byId(chatting() ? 'message' : 'text');
  box.value = words;
  box.dispatchEvent(new Event('input'));
  box.focus();
  box.setSelectionRange(words.length, words.length);
}

function renderSecond(one) {
  const other = secondModel();
  const items = text.second === null ? null : texts.versionItems(text, text.second);
  byId('second').hidden = !other && !items;
  byId('first-name').hidden = byId('second').hidden;
  byId('first-name').textContent = one ? withStep(one.id, one.step) : '';
  const last = items?.at(-1);
  byId('second-name').textContent = last ? withStep(last.model, last.step) : other ? withStep(nameOf(other), other.step) : '';
  const words = element('div', { className: 'words', dir: 'auto' }, ...(items ?? []).map(item => run(item, 'second')));
  inspectable(words);
  byId('second-text').replaceChildren(items ? words
    : element('p', { className: 'empty' }, 'The second model continues the same text here.'));
  byId('use-second').hidden = !items || Boolean(writing);
}

const withStep = (name, step) => step == null ? name : `${name} · step ${step.toLocaleString('en')}`;

const nameOf = other => second.name ? `${other.id} at ${second.name}` : other.id;

function renderTools() {
  const items = texts.shown(text);
  const written = items.findLast(item => item.by === 'model');
  const atButton = [byId('send'), byId('stop')].includes(document.activeElement);
  byId('send').hidden = Boolean(writing);
  byId('send').textContent = chatting() ? 'Send' : 'Continue';
  byId('send').disabled = !models.length;
  byId('stop').hidden = !writing;
  if (atButton) (writing ? byId('stop') : byId('send')).focus();
  byId('regenerate').hidden = chatting() || !written;
  byId('regenerate').disabled = Boolean(writing);
  byId('versions').hidden = chatting() || text.versions.length < 2;
  byId('version').textContent = `${text.current + 1} of ${text.versions.length}`;
  byId('previous').disabled = Boolean(writing) || text.current === 0;
  byId('next').disabled = Boolean(writing) || text.current === text.versions.length - 1;
  byId('facts-of-answer').textContent = !chatting() && written ? facts(written) : '';
  byId('copy').hidden = chatting() || !items.length || Boolean(writing);
}

const FINISHES = { length: 'token limit', stop: 'ended', stopped: 'stopped', lost: 'broke off' };

/** How an answer was written, in a few words. */
function facts(item) {
  if (item.by !== 'model') return '';
  return [
    item.read && `after the last ${item.read} tokens`,
    item.count && `${item.count} ${item.count === 1 ? 'token' : 'tokens'}`,
    item.count && item.seconds && `${Math.round(item.count / item.seconds)} tokens/s`,
    item.step != null && `step ${item.step.toLocaleString('en')}`,
    FINISHES[item.finish],
  ].filter(Boolean).join(' · ');
}

function renderSaved() {
  const rows = texts.saved().map(one => {
    const name = one.title || 'Untitled';
    const isOpen = one.id === text.id;
    const choose = button(element('bdi', {}, name), () => open(isOpen ? text : texts.load(one.id)), { className: 'quiet saved' });
    if (isOpen) choose.setAttribute('aria-current', 'true');
    const remove = button('✕', () => removeText(one), { className: 'quiet icon', label: `Delete “${name}”` });
    return element('li', {}, choose, remove);
  });
  byId('saved').replaceChildren(...rows);
}

function notify(words, label, action) {
  if (!words) return byId('banner').replaceChildren();
  const sentence = /^[a-z]+ /.test(words) ? words[0].toUpperCase() + words.slice(1) : words; // not if it names a field
  const parts = [element('p', {}, sentence)];
  if (label) parts.push(button(label, () => { notify(''); action(); }));
  parts.push(button('✕', () => notify(''), { className: 'quiet icon', label: 'Close this note' }));
  return byId('banner').replaceChildren(...parts);
}

const say = words => { byId('status').textContent = words; };

function settingChanged(name) {
  if (name === 'other') connectSecond();
  render();
}

const small = matchMedia('(max-width: 900px)');

/** Shows or hides the saved texts, which on a small screen lie over the text. */
function toggleMenu(opened = !menuIsOpen()) {
  document.documentElement.classList.toggle('menu', opened === small.matches);
  byId('menu').ariaExpanded = String(opened);
  if (opened) byId('new').focus();
  else if (small.matches) byId('menu').focus();
}

const menuIsOpen = () => document.documentElement.classList.contains('menu') === small.matches;

function openSettings(opened) {
  byId('settings').hidden = !opened;
  byId('open-settings').ariaExpanded = String(opened);
  (opened ? byId('settings').querySelector('input') : byId('open-settings')).focus();
}

// --- What people do ---

byId('send').onclick = send;
byId('stop').onclick = stop;
byId('regenerate').onclick = () => again();
byId('new').onclick = () => newText();
byId('previous').onclick = () => showVersion(text.current - 1);
byId('next').onclick = () => showVersion(text.current + 1);
byId('use-second').onclick = useSecond;
byId('copy').replaceWith(Object.assign(copyButton(() => texts.wordsOf(texts.shown(text))), { id: 'copy' }));
byId('model').onchange = () => {
  if (texts.isEmpty(text)) text.mode = model().chat ? 'chat' : 'text';
  render();
};
byId('reset').onclick = () => settings.reset();
byId('open-settings').onclick = () => openSettings(byId('settings').hidden);
byId('close-settings').onclick = () => openSettings(false);
byId('menu').onclick = () => toggleMenu();
byId('close-menu').onclick = () => toggleMenu(false);
byId('compare').onclick = () => {
  settings.set('compare', !settings.values.compare);
  if (settings.values.compare && !secondModel()) {
    openSettings(true);
    settings.form.elements.other.focus();
  }
};
chooseTheme();
byId('message').oninput = ({ target }) => { text.message = target.value; };
for (const radio of document.getElementsByName('mode')) {
  radio.onchange = () => {
    if (texts.isEmpty(text)) {
      text.mode = radio.value;
      render();
    } else newText(radio.value);
  };
}

document.addEventListener('keydown', event => {
  const enter = event.key === 'Enter' && !event.isComposing;
  const inMessage = event.target === byId('message');
  const inForm = event.target.closest('form');
  if (enter && !inForm && (event.ctrlKey || event.metaKey || (inMessage && !event.shiftKey))) {
    event.preventDefault();
    send();
  } else if (event.key === 'Escape' && !byId('key').open) {
    if (panel.pinned) byId('text').focus();
    if (!panel.element.hidden) panel.hide();
    else if (writing || asked) stop();
    else if (!byId('settings').hidden) openSettings(false);
    else if (small.matches && menuIsOpen()) toggleMenu(false);
  } else if (event.key === 'ArrowDown' && event.altKey && panel.token) {
    event.preventDefault();
    pin();
    panel.element.querySelector('button')?.focus();
  } else if (panel.pinned && ['ArrowUp', 'ArrowDown'].includes(event.key)) {
    event.preventDefault();
    const all = [...panel.element.querySelectorAll('button')];
    all.at((all.indexOf(document.activeElement) + (event.key === 'ArrowDown' ? 1 : -1)) % all.length)?.focus();
  } else if (['ArrowLeft', 'ArrowRight'].includes(event.key) && event.target.classList.contains('inspectable')) {
    event.preventDefault();
    const all = [...event.target.querySelectorAll('.token')];
    const next = all[all.indexOf(panel.token) + (event.key === 'ArrowRight' ? 1 : -1)];
    if (next) inspect(next, true);
  }
});

/** Lets somebody choose another token. */
function pin() {
  if (!writing && panel.token) panel.pin();
}

function inspect(token, aloud) {
  if (panel.pinned) return undefined;
  if (!settings.values.probabilities || !token) return panel.hide();
  panel.show(token);
  if (aloud) say(panel.words);
  return undefined;
}

byId('text').addEventListener('keyup', event => {
  if (event.key.startsWith('Arrow') && !event.shiftKey && !event.altKey) inspect(editor.tokenAtCaret(), true);
});
document.addEventListener('focusout', ({ relatedTarget }) => {
  if (!panel.element.contains(relatedTarget)) panel.hide();
});
byId('main').addEventListener('click', ({ clientX, clientY }) => {
  const token = tokenAt(clientX, clientY);
  if (!token || byId('text').selectionStart !== byId('text').selectionEnd) return;
  panel.hide();
  inspect(token);
  pin();
});
document.addEventListener('pointerdown', event => {
  if (panel.element.contains(event.target)) event.preventDefault(); // the focus stays in the text
  else panel.hide();
});
document.addEventListener('scroll', () => panel.hide(), { passive: true });
let pointer = 0;
for (const kind of ['pointermove', 'pointerdown']) {
  document.addEventListener(kind, ({ clientX, clientY }) => {
    cancelAnimationFrame(pointer);
    pointer = requestAnimationFrame(() => inspect(tokenAt(clientX, clientY)));
  });
}
document.addEventListener('visibilitychange', async () => {
  if (document.hidden || writing || !models.length) return;
  models = await here.models().catch(() => models); // a newer step may be served
  render();
});
addEventListener('pagehide', () => save());
addEventListener('storage', ({ key }) => {
  texts.forgetList();
  if (key?.endsWith(text.id) && !writing) text = texts.load(text.id) ?? text;
  render();
});

const newest = () => texts.saved().map(({ id }) => texts.load(id))[0];

async function start() {
  if (!await connect()) return;
  byId('model').replaceChildren(...models.map(({ id }) => element('option', { value: id }, id)));
  notify('');
  if (!text || texts.isEmpty(text)) text = newest() ?? texts.create(model().chat ? 'chat' : 'text');
  const wanted = asked;
  open(text);
  await connectSecond();
  if (wanted) send();
}

open(newest() ?? texts.create('text'));
start();
