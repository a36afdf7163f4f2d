// Elements of a page, and what its parts have in common.

export const byId = id => document.getElementById(id);

/** A new element with properties and children. Strings become text nodes, never HTML. */
export function element(name, properties = {}, ...children) {
  const { label, ...others } = properties;
  const made = Object.assign(document.createElement(name), others);
  if (label) made.setAttribute('aria-label', label);
  made.append(...children);
  return made;
}

export const button = (words, action, properties = {}) =>
  element('button', { type: 'button', className: 'quiet', onclick: action, ...properties }, words);

/** Fills a place with what `make` makes of the items, and leaves it alone if they are those that it has. */
export function fill(place, items, make) {
  const now = JSON.stringify(items);
  if (place.dataset.items === now) return;
  place.dataset.items = now;
  place.replaceChildren(...items.map(make));
}

/** The bytes of gzip, as base64. */
export async function inflated(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
