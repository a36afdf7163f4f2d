// The live page: what the events say is drawn at most a few times a second.

import { Charts, FRACTION } from './charts.js';
import { follow } from './connection.js';
import { byId, element, fill } from './dom.js';
import './info.js';
import { colorOf } from './plots.js';
import { Runs } from './runs.js';
import { askForKey, chooseTheme } from './served.js';

const FIRST = ['loss', 'val_loss', 'grad_norm', 'learning_rate', 'tokens_per_second', 'mfu', 'goodput'];
const LATER = ['step', 'tokens', 'skipped_steps', 'skipped_in_a_row', 'mfu_full', 'clipped_grad_norm'];
const SETTINGS = 'pretrax.watch';
const MOST_SAMPLES = 10;
const MANY = 6; // runs, which can be filtered by name

const settings = { axis: 'step', smoothing: 0, clip: true, log_x: false, log_y: false, keys: {}, hidden: {}, ...JSON.parse(localStorage.getItem(SETTINGS) ?? '{}') };
const runs = new Runs();
let terms = {}; // what words of the page mean, as [name, unit, meaning]
let chosen = null; // id of the run that is shown alone
let heard = null; // when the server was last heard of
let filter = ''; // what the names of the runs that are shown contain

const keep = () => localStorage.setItem(SETTINGS, JSON.stringify(settings));
const definitionOf = key => runs.definitions[key] ?? terms[key] ?? [key, '', ''];
const isShown = key => settings.keys[key] ?? FIRST.includes(key);
const matches = run => run.info.name.toLowerCase().includes(filter);
const charts = new Charts(byId('charts'), byId('plain'), definitionOf, () => ({
  runs: runs.list.map((run, number) => [run, number]).filter(([run]) => matches(run) && !settings.hidden[run.id]),
  axis: settings.axis, smoothing: settings.smoothing, clip: settings.clip, logX: settings.log_x, logY: settings.log_y,
}));

// Numbers as people read them

const whole = value => value.toLocaleString('en-US', { maximumFractionDigits: 0 });
const short = value => typeof value !== 'number' ? String(value)
  : Math.abs(value) >= 1000 ? value.toLocaleString('en-US', { notation: Math.abs(value) < 1e4 ? 'standard' : 'compact', maximumSignificantDigits: 4 })
    : String(Number(value.toPrecision(4)));
const percent = value => typeof value === 'number' ? `${(100 * value).toFixed(1)} %` : String(value);

function duration(seconds) {
  if (seconds < 0) return '0 s';
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;
  return `${(seconds / 86_400).toFixed(1)} d`;
}

const clock = seconds => new Date(seconds * 1000).toLocaleString('en-GB', { dateStyle: 'short', timeStyle: 'medium' });

const valueText = (key, value) => value === undefined || value === null ? ''
  : definitionOf(key)[1] === FRACTION ? percent(value) : Number.isInteger(value) ? whole(value) : short(value);

// The table of runs

const COLUMNS = [
  ['run', run => nameCell(run)],
  ['state', ({ info }) => element('span', { className: 'state', title: info.why ?? '' }, info.stalled ? 'stalled' : info.state ?? '')],
  ['progress', ({ info }) => progressCell(info)],
  ['ends', ({ info }) => info.ends ? `in ${duration(info.ends - runs.now)}` : ''],
  ...['loss', 'val_loss', 'tokens_per_second', 'mfu', 'goodput'].map(key => [key, ({ info }) => valueText(key, info.last[key])]),
  ['heard', ({ info }) => info.heard ? `${duration(runs.now - info.heard)} ago` : ''],
  ['restarts', ({ info }) => info.restarts ? whole(info.restarts) : ''],
];
const WORDS = ['run', 'state', 'progress'];
const SHORT = { run: 'Run', loss: 'Loss', val_loss: 'Val. loss', tokens_per_second: 'Tokens/s', mfu: 'MFU', goodput: 'Goodput' };

function nameCell(run) {
  const number = runs.about.ids.indexOf(run.id);
  const box = element('input', { type: 'checkbox', checked: !settings.hidden[run.id], onchange: () => {
    settings.hidden[run.id] = !box.checked;
    keep();
    charts.changed(runs.keys());
  } });
  const swatch = element('span', { className: 'swatch' });
  swatch.style.borderColor = colorOf(number);
  return element('label', { className: 'name', title: run.id }, box, swatch, element('bdi', {}, run.info.name));
}

function progressCell({ step, steps, reading, lines }) {
  if (reading) return `reading, ${whole(lines)} lines`;
  if (step === null || step === undefined) return 'no steps yet';
  if (!steps) return whole(step);
  const bar = element('progress', { max: steps, value: step, label: 'Progress' });
  return element('span', {}, bar, ` ${percent(step / steps)} · ${whole(step)} of ${whole(steps)}`);
}

const columnName = term => SHORT[term] ?? definitionOf(term)[0];

const meaningOf = ([name, , meaning]) => element('span', {}, element('b', {}, name), `: ${meaning}`);

function drawDefinitions() {
  byId('runs').tHead.rows[0].replaceChildren(...COLUMNS.map(([term]) =>
    element('th', { scope: 'col', className: WORDS.includes(term) ? '' : 'number' }, columnName(term))));
  byId('about-runs').replaceChildren(...COLUMNS.slice(1).map(([term]) => meaningOf([columnName(term), ...definitionOf(term).slice(1)])));
  for (const term of ['curves', 'attempts']) byId(`about-${term}`).replaceChildren(meaningOf(definitionOf(term)));
}

function drawRuns() {
  const body = byId('runs').tBodies[0];
  const rows = new Map([...body.rows].map(row => [row.dataset.id, row]));
  byId('filter').hidden = runs.list.length < MANY && !filter;
  runs.list.forEach((run, index) => {
    const row = rows.get(run.id) ?? element('tr', {}, ...COLUMNS.map(([term]) => {
      const cell = element('td', { className: WORDS.includes(term) ? '' : 'number' });
      cell.dataset.label = columnName(term);
      return cell;
    }));
    row.dataset.id = run.id;
    row.hidden = !matches(run);
    rows.delete(run.id);
    COLUMNS.forEach(([term, content], column) => {
      const cell = row.cells[column];
      const kind = term === 'run' ? `${run.info.name} ${colorOf(index)}` : null;
      if (term === 'run' && cell.dataset.kind === kind) return; // keeps the focus on its box
      if (kind) cell.dataset.kind = kind;
      const made = content(run);
      if (typeof made === 'string') {
        if (cell.textContent !== made || cell.childElementCount) cell.textContent = made;
      } else cell.replaceChildren(made);
      if (term === 'state') made.dataset.state = made.textContent;
    });
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  for (const row of rows.values()) row.remove();
  fill(byId('warnings'), runs.list.flatMap(({ info }) => info.warnings.map(text => [info.name, text])), ([name, text]) =>
    element('li', { className: 'warning' }, element('b', {}, name), ` ${text}`));
}

// One run

function drawOne() {
  const choice = byId('chosen');
  if (!runs.about.ids.includes(chosen)) chosen = runs.about.ids[0] ?? null;
  fill(choice, runs.list.map(run => [run.id, run.info.name]), ([value, name]) => element('option', { value }, name));
  choice.value = chosen ?? '';
  const run = runs.list.find(one => one.id === chosen);
  const { attempts = [], last = {} } = run?.info ?? {};
  const names = ['Began', 'Steps', 'End'];
  fill(byId('attempts').tBodies[0], attempts, one => element('tr', {}, ...[
    one.start ? clock(one.start) : '', `${one.first_step ?? '?'} to ${one.last_step ?? '?'}`, [one.outcome, one.why].filter(Boolean).join(': '),
  ].map((text, i) => {
    const cell = element('td', {}, text);
    cell.dataset.label = names[i];
    return cell;
  })));
  fill(byId('values'), Object.entries(last).map(([key, value]) => [key, definitionOf(key)[0], valueText(key, value)]), ([key, name, text]) =>
    element('tr', {}, element('th', { scope: 'row', title: key }, name), element('td', {}, text)));
  const samples = (run?.samples ?? []).slice(-MOST_SAMPLES).reverse();
  fill(byId('samples'), samples.length ? samples : ['none'], one => one === 'none'
    ? element('p', { className: 'empty' }, 'No samples yet. sample.every sets how often a run writes some.')
    : element('div', { className: 'sample', dir: 'auto' }, element('h4', {}, `Step ${whole(one.step)}`),
      element('span', { className: 'prompt' }, one.prompt), one.text));
}

// All of it

function drawKeys() {
  const found = runs.keys().filter(key => key !== 'step');
  const place = key => (FIRST.includes(key) ? FIRST.indexOf(key) : LATER.includes(key) ? 900 + LATER.indexOf(key) : 100);
  const keys = [...found].sort((a, b) => place(a) - place(b));
  charts.show(keys.filter(isShown));
  fill(byId('keys'), keys.map(key => [key, definitionOf(key)[0]]), ([key, name]) => element('label', {},
    element('input', { type: 'checkbox', checked: isShown(key), onchange: ({ target }) => {
      settings.keys[key] = target.checked;
      keep();
      charts.show(keys.filter(isShown));
    } }), element('span', { title: key }, name)));
}

function drawTitle() {
  const running = runs.list.filter(({ info }) => info.state === 'running').length;
  const [first] = runs.list;
  const { step, steps } = first?.info ?? {};
  byId('title').textContent = runs.list.length === 1 ? first.info.name : `${runs.list.length} runs, ${running} running`;
  document.title = runs.list.length === 1 && steps ? `${percent(step / steps)} ${first.info.name}` : `${byId('title').textContent} · pretrax`;
  const { hidden, problem, where } = runs.about;
  const notices = [
    problem && `The directory cannot be read: ${problem}`,
    hidden && `${whole(hidden)} more runs are not shown.`,
    !runs.list.length && where && `No runs yet in ${where}. They are shown when they appear.`,
  ].filter(Boolean);
  byId('notice').hidden = !notices.length;
  byId('notice').textContent = notices.join(' ');
}

let due = false;
function drawSoon() {
  if (due) return;
  due = true;
  setTimeout(() => {
    due = false;
    drawKeys();
    drawRuns();
    drawOne();
    drawTitle();
  }, 100);
}

const connection = byId('connection');

/** Says how the connection is; the words change only when the state does, for those who have them read aloud. */
function showConnection(state) {
  if (state === 'live') heard = Date.now();
  if (connection.dataset.state === state) return;
  connection.dataset.state = state;
  connection.textContent = state === 'live' ? 'live'
    : heard ? `connection lost, trying again; as of ${new Date(heard).toLocaleTimeString('en-GB')}` : 'no answer from the server, trying again';
}

const form = byId('controls');
for (const field of form.elements) {
  if (field.type === 'checkbox') field.checked = settings[field.name];
  else if (field.name in settings) field.value = settings[field.name];
}
form.weight.value = settings.smoothing;
form.addEventListener('input', ({ target }) => {
  settings[target.name] = target.type === 'checkbox' ? target.checked : target.type === 'range' ? Number(target.value) : target.value;
  form.weight.value = settings.smoothing;
  keep();
  charts.changed(runs.keys());
});
form.addEventListener('submit', event => event.preventDefault());
byId('filter').oninput = ({ target }) => {
  filter = target.value.trim().toLowerCase();
  redraw();
};
byId('chosen').onchange = ({ target }) => {
  chosen = target.value;
  drawOne();
};
chooseTheme(redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraw());

function redraw() {
  charts.changed(runs.keys());
  drawSoon();
}

setInterval(drawRuns, 1000); // ages grow
follow({
  event(type, data) {
    if (type === 'terms') terms = data;
    charts.changed(runs.apply(type, data));
    if (type === 'terms' || type === 'definitions') drawDefinitions();
    if (type !== 'time') drawSoon();
  },
  state: showConnection,
  askForKey: async () => await askForKey('This server shows its runs to those who have a key.') ?? '',
});
