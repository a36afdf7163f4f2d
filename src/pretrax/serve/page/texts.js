// Saved texts and chats. Each is a table of items (somebody's words) and versions (lists of item numbers), so that an
// edit or another answer adds a version and shares the items before it.
//
// item: {id, by: 'you' | 'model', text, tokens?, model?, step?, finish?, count?, seconds?}
// token: [start, end, text, logprob, [[text, logprob], ...]]; start and end are positions in the item's text

const PREFIX = 'pretrax.text.';

export function create(mode) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, mode, changed: Date.now(), items: {}, next: 0, versions: [[]], current: 0, draft: null, second: null };
}

export function add(text, item) {
  const id = text.next++;
  text.items[id] = { ...item, id };
  return text.items[id];
}

/** Items of the version that is shown, or of the unsaved edit of it. */
export const shown = text => (text.draft ?? text.versions[text.current]).map(id => text.items[id]);

export const versionItems = (text, version) => text.versions[version].map(id => text.items[id]);

export const wordsOf = items => items.map(item => item.text).join('');

const CODE = new RegExp([
  String.raw`^\s*(def|class|import|return|async|function|const|let|var|public|private|fn|struct|package|using|#include)\b`,
  String.raw`^\s*(from \S+ import|(if|elif|else|for|while|with|try|except)\b.*:$|//|#|@)`,
  String.raw`[;{}]\s*$|^(\t| {2,})\S|^\s*[\w.]+\(.*\)|^\s*[\w.[\]]+ [-+*/]?= `,
].join('|'));

/** Whether most lines of a text look like those of a program. */
export function isCode(words) {
  const lines = words.split('\n').filter(line => line.trim());
  return 2 * lines.filter(line => CODE.test(line)).length > lines.length;
}

export const isEmpty = text => shown(text).length === 0 && text.versions.length === 1;

/** Makes an edit of the whole text a draft: what stays keeps its author and its tokens. */
export function edit(text, value) {
  const items = shown(text);
  const old = wordsOf(items);
  if (value === old) return;
  const most = Math.min(old.length, value.length);
  let start = 0;
  while (start < most && old[start] === value[start]) start++;
  if (start && isHighSurrogate(old, start - 1)) start--;
  let end = 0;
  while (end < most - start && old[old.length - 1 - end] === value[value.length - 1 - end]) end++;
  if (end && isHighSurrogate(old, old.length - end - 1)) end--;
  const parts = [
    ...between(text, items, 0, start),
    add(text, { by: 'you', text: value.slice(start, value.length - end) }),
    ...between(text, items, old.length - end, old.length),
  ];
  text.draft = [];
  let last = null;
  for (const item of parts.filter(item => item.text)) {
    if (last?.by === 'you' && item.by === 'you') {
      last = add(text, { by: 'you', text: last.text + item.text });
      text.draft.splice(-1, 1, last.id);
    } else {
      last = item;
      text.draft.push(item.id);
    }
  }
}

const isHighSurrogate = (text, at) => (text.charCodeAt(at) & 0xfc00) === 0xd800;

/** Items of the characters from start to end of a text; the first and the last may be cut. */
function between(text, items, start, end) {
  const found = [];
  let position = 0;
  for (const item of items) {
    const from = Math.max(start - position, 0);
    const to = Math.min(end - position, item.text.length);
    if (from === 0 && to === item.text.length) found.push(item);
    else if (from < to) {
      const tokens = item.tokens?.filter(token => token[0] >= from && token[1] <= to)
        .map(([a, b, ...rest]) => [a - from, b - from, ...rest]);
      found.push(add(text, { ...item, text: item.text.slice(from, to), tokens }));
    }
    position += item.text.length;
  }
  return found;
}

/** Keeps the draft: an edit of earlier words is a new version, words at the end are not. */
export function commit(text) {
  if (!text.draft) return;
  const before = versionItems(text, text.current);
  const extends_ = wordsOf(shown(text)).startsWith(wordsOf(before));
  if (extends_ || !before.some(item => item.by === 'model')) text.versions[text.current] = text.draft;
  else text.current = text.versions.push(text.draft) - 1;
  text.draft = null;
}

export function fork(text, ids) {
  text.draft = null;
  text.current = text.versions.push(ids) - 1;
}

/** A version that ends with another token in place of a token of a written item. */
export function replaceToken(text, ids, item, number, [words, logprob]) {
  const [start, , , , top] = item.tokens[number];
  const token = [start, start + words.length, words, logprob, top];
  const written = add(text, {
    ...item, text: item.text.slice(0, start) + words, tokens: [...item.tokens.slice(0, number), token],
    count: number + 1, seconds: item.seconds * (number + 1) / item.tokens.length,
  });
  fork(text, [...ids.slice(0, ids.indexOf(item.id)), written.id]);
}

/** The different items at a place of a chat, after the same items before it, and the newest version of each. */
export function alternatives(text, place) {
  const path = text.versions[text.current];
  const newest = new Map();
  text.versions.forEach((ids, version) => {
    const same = ids.length > place && path.slice(0, place).every((id, i) => ids[i] === id);
    if (same) newest.set(ids[place], version);
  });
  return { ids: [...newest.keys()], versions: [...newest.values()], at: [...newest.keys()].indexOf(path[place]) };
}

export function title(text) {
  return wordsOf(shown(text).slice(0, text.mode === 'chat' ? 1 : 2)).trim().replace(/\s+/g, ' ').slice(0, 60);
}

let list = null; // what `saved` returns, so that it is read from the storage once

/** `{id, title, changed}` of every saved text, the newest first. */
export function saved() {
  list ??= new Map(Object.keys(localStorage).filter(key => key.startsWith(PREFIX))
    .map(key => [key.slice(PREFIX.length), summary(JSON.parse(localStorage.getItem(key)))]));
  return [...list.values()].sort((a, b) => b.changed - a.changed);
}

const summary = text => ({ id: text.id, title: title(text), changed: text.changed });

/** Another tab changed the storage. */
export const forgetList = () => { list = null; };

export const load = id => JSON.parse(localStorage.getItem(PREFIX + id));

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
  list?.delete(id);
}

/** Saves a text. If the browser's storage is full, the oldest token probabilities go first. Returns whether it is saved. */
export function save(text) {
  const used = new Set([...text.versions.flat(), ...(text.draft ?? [])]);
  for (const id of Object.keys(text.items)) if (!used.has(Number(id))) delete text.items[id];
  let done = put(text);
  for (const { id } of done ? [] : saved().reverse()) {
    if (id === text.id) continue;
    put(withoutTokens(load(id)));
    done = put(text);
    if (done) break;
  }
  done ||= put(withoutTokens(text));
  if (done) list?.set(text.id, summary(text));
  return done;
}

function put(text) {
  try {
    localStorage.setItem(PREFIX + text.id, JSON.stringify(text));
    return true;
  } catch (error) {
    if (error.name !== 'QuotaExceededError') throw error;
    return false;
  }
}

const withoutTokens = text => ({
  ...text, items: Object.fromEntries(Object.values(text.items).map(({ tokens, ...item }) => [item.id, item])),
});
