// What an empty page offers to begin with.

import { button, element } from './dom.js';
import { isCode } from './texts.js';

const EXAMPLES = {
  text: ['def read_lines(path):\n', 'class Stack:\n    def push(self, item):\n', 'Once upon a time, in a small village', 'The capital of France is'],
  chat: ['Explain in two sentences how rain forms.', 'Write a Python function that reverses a string.', 'Tell a short story about a lighthouse.', 'What is the capital of France?'],
};

/** Buttons that give `chosen` a text to continue, or the first message of a chat. */
export const examples = (mode, chosen) => EXAMPLES[mode].map(words => {
  const [line] = words.split('\n');
  return button(isCode(words) ? element('code', {}, line) : line, () => chosen(words), { className: 'wide example' });
});
