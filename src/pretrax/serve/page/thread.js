// A chat: messages, each with its alternatives, and two answers side by side.

import { button, element } from './dom.js';
import { run } from './runs.js';
import { alternatives, isCode, shown, versionItems } from './texts.js';

export class Thread {
  /** `actions`: edit(place, words), regenerate(place), goOn(), show(version), facts(item), useSecond(). */
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.editing = null; // place of the message that is edited
  }

  show(text, busy) {
    const items = shown(text);
    const second = secondAnswer(text);
    const messages = items.map((item, place) => this.#message(text, item, place, busy));
    if (second) {
      const columns = element('div', { className: 'columns' }, messages.pop());
      columns.append(this.#article(second, [
        ...busy ? [] : [button('Go on with this answer', () => this.actions.useSecond()), copyButton(() => second.text)],
      ]));
      messages.push(columns);
    }
    this.root.replaceChildren(...messages);
  }

  #message(text, item, place, busy) {
    if (place === this.editing && !busy) return this.#form(item, place);
    const { ids, versions, at } = alternatives(text, place);
    const tools = [];
    if (ids.length > 1) {
      const go = step => () => this.actions.show(versions[at + step]);
      tools.push(element('span', { className: 'versions', role: 'group', label: 'Versions of this message' },
        button('‹', go(-1), { className: 'quiet icon', label: 'Previous version', disabled: busy || at === 0 }),
        `${at + 1} of ${ids.length}`,
        button('›', go(1), { className: 'quiet icon', label: 'Next version', disabled: busy || at === ids.length - 1 })));
    }
    if (!busy) {
      tools.push(button('Edit', () => {
        this.editing = place;
        this.show(text, busy);
        this.root.querySelector('form textarea').focus();
      }));
      if (item.by === 'model') tools.push(button('Regenerate', () => this.actions.regenerate(place)));
      if (item.by === 'model' && place === shown(text).length - 1 && item.finish !== 'stop') tools.push(button('Continue', () => this.actions.goOn()));
      tools.push(copyButton(() => item.text));
    }
    return this.#article(item, tools);
  }

  #article(item, tools) {
    const name = item.by === 'you' ? 'You' : item.model;
    const words = element('div', { className: 'words', dir: 'auto' }, run(item, 'thread'));
    words.classList.toggle('code', !item.text.includes('```') && isCode(item.text));
    if (item.by === 'model') inspectable(words);
    const facts = element('span', { className: 'facts', textContent: this.actions.facts(item) });
    facts.dataset.item = item.id;
    return element('article', { className: `message by-${item.by}`, label: `Message of ${name}` },
      element('h2', {}, element('bdi', {}, name)), words,
      element('div', { className: 'tools' }, ...tools,
        facts));
  }

  /** Shows how fast an item that grows is written. */
  grow(item) {
    const facts = this.root.querySelector(`.facts[data-item='${item.id}']`);
    if (facts) facts.textContent = this.actions.facts(item);
  }

  #form(item, place) {
    const area = element('textarea', { value: item.text, rows: 4, dir: 'auto', label: 'Message' });
    const save = () => {
      this.editing = null;
      this.actions.edit(place, area.value);
    };
    const cancel = () => {
      this.editing = null;
      this.actions.edit(place, item.text);
    };
    const form = element('form', { className: 'message editing', onsubmit: event => { event.preventDefault(); save(); } },
      area, element('div', { className: 'tools' },
        element('button', { className: 'primary' }, item.by === 'you' ? 'Send' : 'Save'), button('Cancel', cancel)));
    form.addEventListener('keydown', event => {
      if (event.key === 'Escape') cancel();
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) save();
    });
    return form;
  }
}

/** A button that copies `words()`. */
export function copyButton(words) {
  const copy = button('Copy', async () => {
    await copied(words());
    copy.textContent = 'Copied';
    setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
  });
  return copy;
}

/** Copies words, also on a page that came over http from another machine, where there is no `navigator.clipboard`. */
async function copied(words) {
  if (navigator.clipboard) return navigator.clipboard.writeText(words);
  const area = element('textarea', { value: words });
  document.activeElement.after(area);
  area.select();
  document.execCommand('copy');
  return area.remove();
}

/** Makes written text a place that the keyboard reaches, to go through its tokens. */
export function inspectable(words) {
  words.tabIndex = 0;
  words.role = 'group';
  words.classList.add('inspectable');
  words.ariaLabel = 'Written text. The arrow keys show the probabilities of its tokens.';
}

/** The last answer of the second version, if it answers the same messages. */
function secondAnswer(text) {
  if (text.second === null || text.second === text.current) return null;
  const ids = text.versions[text.current];
  const others = text.versions[text.second];
  const same = others.length === ids.length && ids.slice(0, -1).every((id, i) => id === others[i]);
  return same && ids.length ? versionItems(text, text.second).at(-1) : null;
}
