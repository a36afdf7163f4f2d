// Words of one author on the page, token by token, and the panel that shows the probabilities of a token.
// Text reaches the page through `textContent` and text nodes only, never as HTML.

import { button } from './dom.js';

const elements = new WeakMap(); // item -> {place: {run, tokens, length}}
const tokens = new WeakMap(); // element of a token -> [item, number of its last token]

/** The element that shows an item at a place of the page. It stays the same while the item grows. */
export function run(item, place) {
  if (!elements.has(item)) elements.set(item, {});
  const places = elements.get(item);
  if (!places[place]) {
    const element = document.createElement('span');
    element.className = `run ${item.by}`;
    places[place] = { run: element, tokens: 0, length: 0, tail: [], hasBlocks: place === 'thread', fences: [], blocks: [] };
    growAt(item, places[place]);
  }
  return places[place].run;
}

/** Shows what was added to an item: its new tokens, then text whose token is not known yet. */
export function grow(item) {
  for (const shown of Object.values(elements.get(item) ?? {})) growAt(item, shown);
}

function growAt(item, shown) {
  const fences = shown.hasBlocks ? fencesOf(item.text) : [];
  if (String(fences) === String(shown.fences)) for (const node of shown.tail) node.remove();
  else {
    shown.run.replaceChildren();
    Object.assign(shown, { fences, blocks: [], tokens: 0, length: 0 });
  }
  for (; shown.tokens < (item.tokens?.length ?? 0); shown.tokens++) {
    const [start, end, , logprob] = item.tokens[shown.tokens];
    texts(item, shown, start);
    if (end > start) {
      const element = document.createElement('span');
      element.className = `token level-${level(Math.exp(logprob))}`;
      element.textContent = item.text.slice(start, end);
      const isEdge = fences.some(([from, to]) => end === from || (start < to && end >= to)); // a block has lines of its own
      if (isEdge && !element.textContent.trim()) element.classList.add('edge');
      tokens.set(element, [item, shown.tokens]);
      parent(shown, start).append(element);
    }
    shown.length = Math.max(shown.length, end);
  }
  const { length } = shown;
  shown.tail = texts(item, shown, item.text.length);
  shown.length = length;
}

/** Shows the text up to `end` as text nodes, each within one block or between blocks, and returns them. */
function texts(item, shown, end) {
  const nodes = [];
  const cuts = shown.fences.flat().filter(cut => cut > shown.length && cut < end);
  for (const cut of end > shown.length ? [...cuts, end] : []) {
    nodes.push(new Text(item.text.slice(shown.length, cut)));
    parent(shown, shown.length).append(nodes.at(-1));
    shown.length = cut;
  }
  return nodes;
}

/** The block of code that a character belongs to, or the run. */
function parent({ run, fences, blocks }, position) {
  const number = fences.findIndex(([start, end]) => start <= position && position < end);
  if (number < 0) return run;
  if (!blocks[number]) {
    blocks[number] = Object.assign(document.createElement('span'), { className: 'fenced' });
    run.append(blocks[number]);
  }
  return blocks[number];
}

/** [start, end) of each block of code between lines of ```; Infinity: its end is not written yet. */
function fencesOf(text) {
  const fences = [];
  for (const { index, 0: line } of text.matchAll(/^ {0,3}```.*(?:\n|$)/gm)) {
    const open = fences.at(-1)?.[1] === Infinity;
    if (!open) fences.push([index, Infinity]);
    else if (line.trim() === '```') fences.at(-1)[1] = index + line.length;
  }
  return fences;
}

/** 0: likely, 4: very unlikely. */
const level = probability => [0.9, 0.5, 0.2, 0.05].filter(least => probability < least).length;

const FAR = 16; // characters; text that is not this near belongs to another token

/** Adds what a server sends to an item, and finds the place of each token in the text. */
export class Aligner {
  constructor(item) {
    this.item = item;
    this.raw = ''; // what was added, with the line ends of the model
    this.at = { points: 0, units: 0, position: item.text.length }; // in characters, in units of `raw`, in the item's text
    this.first = null; // offset of the first token
    this.last = null; // a token whose end is not known yet
    this.end = item.text.length; // of the tokens whose text was found
    this.torn = false; // the last token has a part of a character
  }

  add(text, tokens, finished) {
    const follows = this.raw.endsWith('\r') && text.startsWith('\n');
    this.raw += text;
    this.item.text += normal(follows ? text.slice(1) : text);
    for (const token of tokens) {
      this.#close(token.offset === null ? this.#find(normal(token.text)) : this.#place(token.offset));
      const top = token.top.map(([other, logprob]) => [other, round(logprob)]);
      this.last = [this.start, null, token.text, round(token.logprob), top];
    }
    if (finished) this.#close(this.item.text.length);
  }

  /** Ends the last token where the next one starts. */
  #close(start) {
    this.start = Math.min(start, this.item.text.length);
    if (!this.last) return;
    this.last[1] = Math.max(this.start, this.last[0]);
    this.item.tokens.push(this.last);
    this.last = null;
  }

  /** The place of an offset in characters. */
  #place(offset) {
    this.first ??= offset;
    const { at, raw } = this;
    while (at.points < offset - this.first && at.units < raw.length) {
      const size = raw.codePointAt(at.units) > 0xffff ? 2 : 1;
      if (raw[at.units] !== '\n' || raw[at.units - 1] !== '\r') at.position += size;
      at.units += size;
      at.points++;
    }
    return at.position;
  }

  /** The place of a token's text, after the tokens before it. */
  #find(words) {
    const { text } = this.item;
    const torn = words.includes('\ufffd');
    const before = this.end;
    if (torn || !words) {
      this.torn ||= torn;
      return before;
    }
    const begun = before < text.length && words.startsWith(text.slice(before)); // the rest of it comes later
    const found = begun ? before : text.slice(before, before + FAR + words.length).indexOf(words);
    const start = begun ? before : before + Math.max(found, 0);
    const known = begun || found >= 0;
    if (known) this.end = start + words.length;
    const own = this.torn && known ? start : before; // text between belongs to the torn character, or is a space
    this.torn &&= !known;
    return own;
  }
}

/** A text box holds line ends as \n only. */
export const normal = text => text.replace(/\r\n?/g, '\n');

const round = logprob => Math.round((logprob ?? 0) * 1e4) / 1e4;

/** The token at a point of the page, also behind a text box. */
export const tokenAt = (x, y) => document.elementsFromPoint(x, y).find(element => tokens.has(element));

/** The element of the token that a character of an item belongs to. */
export function tokenOfCharacter(item, place, position) {
  return [...run(item, place).querySelectorAll('.token')].find(element => {
    const [start, end] = item.tokens[tokens.get(element)[1]];
    return start <= position && position < end;
  });
}

/** The panel with the probabilities of a token; pinned, it is a list to choose another token from. */
export class TokenPanel {
  /** `chosen(item, number, [text, logprob])`: another token was chosen in place of a token of an item. */
  constructor(element, chosen) {
    this.element = element;
    this.chosen = chosen;
    this.token = null;
    this.pinned = false;
  }

  show(token) {
    if (token === this.token) return;
    this.hide();
    this.token = token;
    token.classList.add('inspected');
    const [item, last] = tokens.get(token);
    const group = [item.tokens[last]]; // with the tokens that only began its character
    for (let i = last - 1; i >= 0 && item.tokens[i][1] === item.tokens[i][0] && item.tokens[i][1] === group[0][0]; i--) {
      group.unshift(item.tokens[i]);
    }
    this.element.replaceChildren(...group.map(table));
    this.element.hidden = false;
    const box = token.getClientRects()[0];
    const { width, height } = this.element.getBoundingClientRect();
    const below = box.bottom + 8 + height < innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.element.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
  }

  /** Makes the rows buttons. */
  pin() {
    const [item, number] = tokens.get(this.token);
    if (this.pinned || this.element.children.length > 1) return; // there is no text for a part of a character
    this.pinned = true;
    this.element.setAttribute('role', 'dialog');
    this.element.setAttribute('aria-label', 'Choose another token');
    for (const row of this.element.querySelectorAll('tr:not(.chosen)')) {
      const other = item.tokens[number][4][row.dataset.number];
      if (other[0] === '' || other[0].includes('\ufffd')) continue;
      const name = row.cells[0];
      const choose = button('', () => this.chosen(item, number, other), { className: 'quiet' });
      choose.append(...name.childNodes);
      name.append(choose);
    }
  }

  hide() {
    this.token?.classList.remove('inspected');
    this.token = null;
    this.pinned = false;
    this.element.setAttribute('role', 'tooltip');
    this.element.removeAttribute('aria-label');
    this.element.hidden = true;
  }

  /** The same in words, for screen readers. */
  get words() {
    const rows = [...this.element.querySelectorAll('tr')];
    return rows.map(row => [...row.cells].map(cell => cell.textContent).join(' ')).join(', ');
  }
}

function table([, , text, logprob, top]) {
  const rows = top.map((other, number) => [...other, number]);
  if (!top.some(([other]) => other === text)) rows.push([text, logprob, -1]);
  const element = document.createElement('table');
  for (const [other, otherLogprob, number] of rows.sort((a, b) => b[1] - a[1])) {
    const row = element.insertRow();
    row.dataset.number = number;
    const [name, bar, percent] = [row.insertCell(), row.insertCell(), row.insertCell()];
    name.append(Object.assign(document.createElement('bdi'), { textContent: visible(other) }));
    const probability = Math.exp(otherLogprob);
    const filled = document.createElement('span');
    filled.style.width = `${probability * 100}%`;
    bar.append(filled);
    bar.className = 'bar';
    percent.textContent = percentage(probability);
    if (other === text) {
      row.className = 'chosen';
      row.setAttribute('aria-label', 'written');
    }
  }
  return element;
}

const percentage = p => p >= 0.9995 ? '100 %' : p < 0.0005 ? '< 0.1 %' : `${(p * 100).toFixed(1)} %`;

const NAMES = { ' ': '␣', '\n': '↵', '\r': '␍', '\t': '⇥' };

/** Spaces, control characters and characters that change the direction of text, made visible. */
function visible(text) {
  const marked = text.replace(/^ +| +$|[\n\r\t]/g, spaces => [...spaces].map(space => NAMES[space]).join(''));
  return marked.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, c => `<U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}>`)
    || '(empty)';
}
