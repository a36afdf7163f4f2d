// Settings: a form whose values are kept in the browser, and the fields of a request that they make.

const KEY = 'pretrax.settings';
const DEFAULTS = {
  temperature: '0.8', max_tokens: '256', top_p: '', top_k: '', min_p: '', seed: '',
  repetition_penalty: '', presence_penalty: '', frequency_penalty: '', stop: '', system: '',
  probabilities: true, colors: false, font: 'auto', other: '', other_model: '', compare: false,
};
const ALTERNATIVES = 5; // likeliest tokens asked for at each position
const NUMBERS = [
  'temperature', 'max_tokens', 'top_p', 'top_k', 'min_p', 'seed', 'repetition_penalty', 'presence_penalty', 'frequency_penalty',
];

export class Settings {
  constructor(form, changed) {
    this.form = form;
    this.values = { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? '{}') };
    this.changed = changed;
    this.#fill();
    document.addEventListener('input', ({ target }) => {
      if (target.form !== form) return; // some fields are beside the text
      if (target.checkValidity()) this.set(target.name, target.type === 'checkbox' ? target.checked : target.value);
      else target.reportValidity();
    });
    form.addEventListener('submit', event => event.preventDefault());
  }

  set(name, value) {
    this.values[name] = value;
    localStorage.setItem(KEY, JSON.stringify(this.values));
    this.changed(name);
  }

  reset() {
    for (const [name, value] of Object.entries(DEFAULTS)) this.set(name, value);
    this.#fill();
  }

  #fill() {
    for (const field of [...this.form.elements].filter(({ name }) => name)) {
      if (field.type === 'checkbox') field.checked = this.values[field.name];
      else field.value = this.values[field.name];
    }
  }

  /** Fields of a request. Those that are off are left out, so that any server with OpenAI's API understands it. */
  request(chat) {
    const fields = {};
    for (const name of NUMBERS) if (this.values[name] !== '') fields[name] = Number(this.values[name]);
    const stop = this.values.stop.split('\n').filter(Boolean);
    if (stop.length) fields.stop = stop.map(line => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));
    if (!this.values.probabilities && !this.values.colors) return fields;
    return { ...fields, ...(chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES }) };
  }
}
