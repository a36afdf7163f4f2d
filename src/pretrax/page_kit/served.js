// What the pages that a server sends share: the choice of a theme, and the question for a key.

import { byId } from './dom.js';

/** Lets the list `theme` choose the colors; `changed` draws again what does not follow by itself. */
export function chooseTheme(changed = () => {}) {
  byId('theme').value = document.documentElement.dataset.theme;
  byId('theme').onchange = ({ target }) => {
    document.documentElement.dataset.theme = target.value;
    localStorage.setItem('pretrax.theme', target.value);
    changed();
  };
}

/** Asks for the key of a server; null: the dialog was closed without one. */
export function askForKey(why) {
  const dialog = byId('key');
  byId('key-why').textContent = why;
  byId('key-value').value = '';
  dialog.returnValue = '';
  if (!dialog.open) dialog.showModal();
  return new Promise(resolve => {
    dialog.onclose = () => resolve(dialog.returnValue === 'ok' ? byId('key-value').value : null);
  });
}
