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

export const byId = id => document.getElementById(id);

/** Keeps the end of the page in view if it was before `change`. */
export function keepingTheEndInView(change) {
  const page = document.scrollingElement;
  const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}
