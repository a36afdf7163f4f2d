// One text that a person and the model write together. A transparent text box, in which the text is edited, lies exactly
// on a mirror, which draws the same words with their authors and tokens. While the model writes, only the mirror grows.

import { run, tokenOfCharacter } from './runs.js';
import { wordsOf } from './texts.js';

export class Editor {
  constructor(root, edited) {
    this.mirror = root.querySelector('.mirror');
    this.box = root.querySelector('textarea');
    this.items = [];
    this.box.addEventListener('input', () => edited(this.box.value));
  }

  show(items) {
    this.items = items;
    this.mirror.replaceChildren(...items.map(item => run(item, 'editor')), '\u200b'); // a last empty line has a height too
    const words = wordsOf(items);
    if (this.box.value === words) return;
    const { selectionStart, selectionEnd, value } = this.box;
    this.box.value = words;
    if (selectionStart < value.length) this.box.setSelectionRange(selectionStart, selectionEnd);
  }

  set readOnly(value) {
    this.box.readOnly = value;
  }

  focusEnd() {
    this.box.focus({ preventScroll: true });
    this.box.setSelectionRange(this.box.value.length, this.box.value.length);
  }

  tokenAtCaret() {
    let position = this.box.selectionStart;
    for (const item of this.items) {
      if (position < item.text.length) return item.tokens ? tokenOfCharacter(item, 'editor', position) : undefined;
      position -= item.text.length;
    }
    return undefined;
  }
}
