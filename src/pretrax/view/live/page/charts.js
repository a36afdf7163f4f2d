// One figure for each key, with the curves of all runs.

import { element, fill } from './dom.js';
import { COLORS, clipped, colorOf, config, escaped, inWords, smoothed, themed } from './plots.js';
import { places } from './runs.js';

const DASHES = ['solid', 'dash', 'dot', 'dashdot'];
export const FRACTION = 'fraction of 1';

export class Charts {
  /**
   * `root`: where the figures are. `plain`: the body of a table of keys that need none. `view()`: {runs: [[run, number]], axis,
   * smoothing, clip, logX, logY} of what is to be drawn.
   */
  constructor(root, plain, definitionOf, view) {
    this.root = root;
    this.plain = plain;
    this.keys = [];
    this.definitionOf = definitionOf;
    this.view = view;
    this.byKey = new Map();
    this.stale = new Set();
    this.drawing = false;
    this.seen = new IntersectionObserver(entries => {
      for (const { target, isIntersecting } of entries) {
        const chart = this.byKey.get(target.dataset.key);
        if (chart) chart.visible = isIntersecting;
      }
      this.#drawSoon();
    }, { rootMargin: '200px' });
  }

  /** Shows figures of these keys, in this order. */
  show(keys) {
    this.keys = keys;
    for (const [key, chart] of this.byKey) {
      if (keys.includes(key)) continue;
      this.seen.unobserve(chart.section);
      Plotly.purge(chart.plot);
      chart.section.remove();
      this.byKey.delete(key);
    }
    keys.forEach((key, index) => {
      if (!this.byKey.has(key)) this.#add(key);
      const { section } = this.byKey.get(key);
      if (this.root.children[index] !== section) this.root.insertBefore(section, this.root.children[index] ?? null);
    });
    this.#say();
  }

  /** Draws the figures of these keys again, if they are in view, and otherwise when they come into view. */
  changed(keys) {
    for (const key of keys) this.stale.add(key);
    this.#drawSoon();
  }

  /** Says in a table what is constant or a straight line, in place of a figure. */
  #say() {
    const { runs } = this.view();
    const rows = [];
    for (const key of this.keys) {
      const [name, unit] = this.definitionOf(key);
      const curves = runs.map(([run]) => [run.info.name, run.curves.get(key)]).filter(([, curve]) => curve?.step.length);
      const words = curves.map(([run, { step, value }]) => [run, inWords(step, value, unit === FRACTION)]);
      const isPlain = words.length > 0 && words.every(([, text]) => text);
      this.byKey.get(key).section.hidden = isPlain;
      const equal = new Set(words.map(([, text]) => text)).size === 1;
      if (isPlain) rows.push([name, equal ? words[0][1] : words.map(([run, text]) => `${run}: ${text}`).join('; ')]);
    }
    fill(this.plain, rows, ([name, text]) => element('tr', {}, element('th', { scope: 'row' }, name), element('td', {}, text)));
    this.plain.closest('.table').hidden = !rows.length;
  }

  #add(key) {
    const [name, unit, meaning] = this.definitionOf(key);
    const id = `meaning-${this.byKey.size}-${Math.random().toString(36).slice(2)}`;
    const words = `${key}: ${meaning}`.split('`').map((part, i) => (i % 2 ? element('code', {}, part) : part));
    const explained = element('div', { className: 'definition', id, hidden: true }, ...words);
    const help = element('button', { type: 'button', className: 'info', ariaExpanded: 'false', label: `What ${name} means` }, 'i');
    help.setAttribute('aria-controls', id);
    const plot = element('div', { className: 'plot' });
    const section = element('section', { className: 'chart', label: name },
      element('h3', {}, name, ' ', element('span', { className: 'unit' }, unit === FRACTION ? '' : unit), ' ', help), explained, plot);
    section.dataset.key = key;
    this.byKey.set(key, { section, plot, visible: false });
    this.stale.add(key);
    this.seen.observe(section);
  }

  #drawSoon() {
    if (this.drawing) return;
    this.drawing = true;
    setTimeout(() => {
      requestAnimationFrame(() => {
        this.drawing = false;
        this.#say();
        const view = this.view();
        for (const key of [...this.stale]) {
          const chart = this.byKey.get(key);
          if (!chart) this.stale.delete(key);
          if (!chart?.visible) continue;
          this.stale.delete(key);
          this.#draw(key, chart.plot, view);
        }
      });
    }, 100);
  }

  #draw(key, plot, view) {
    const [name, unit] = this.definitionOf(key);
    const found = view.runs.filter(([run]) => run.curves.get(key)?.step.length);
    const seconds = view.axis === 'time' ? Math.max(0, ...found.map(([run]) => longest(run))) : 0;
    const [divisor, xTitle] = view.axis !== 'time' ? [1, view.axis === 'tokens' ? 'tokens' : 'step']
      : seconds > 7200 ? [3600, 'hours since the first line'] : seconds > 300 ? [60, 'minutes since the first line'] : [1, 'seconds since the first line'];
    const traces = found.flatMap(([run, number]) => tracesOf(run, number, key, view, divisor));
    const largest = traces.reduce((most, { y }) => y.reduce((known, value) => Math.max(known, Math.abs(value)), most), 0);
    const far = view.clip && !view.logY ? clipped(traces.filter(({ meta }) => meta === 'values')) : null;
    Plotly.react(plot, [...traces, ...far?.traces ?? []], themed({
      height: 260, uirevision: 'kept', annotations: far?.annotations ?? [],
      xaxis: { type: view.logX ? 'log' : 'linear', title: { text: xTitle } },
      yaxis: {
        type: view.logY ? 'log' : 'linear', tickformat: unit === FRACTION ? '.3~%' : '', exponentformat: largest < 0.01 ? 'e' : 'SI',
        ...(far ? { range: far.range } : { autorange: true }),
      },
    }), config({ toImageButtonOptions: { filename: key.replaceAll('/', '-'), scale: 2 } }));
    plot.setAttribute('role', 'group');
    plot.setAttribute('aria-label', `${name}: ${found.map(([run]) => `${run.info.name} ${run.info.last[key] ?? ''}`).join(', ') || 'no values'}`);
  }
}

const longest = run => {
  const time = run.curves.get('time');
  return time?.step.length ? (time.high.at(-1) ?? time.value.at(-1)) - (time.value[0] ?? 0) : 0;
};

function tracesOf(run, number, key, view, divisor) {
  const curve = run.curves.get(key);
  const found = places(run, curve, view.axis);
  if (!found) return [];
  const x = divisor === 1 ? found : found.map(value => value / divisor);
  const color = colorOf(number);
  const shared = { type: 'scatter', x: [...x], mode: x.length < 2 ? 'markers' : 'lines', connectgaps: false };
  const line = { color, width: 1.6, dash: DASHES[Math.floor(number / COLORS.light.length) % DASHES.length] };
  const name = escaped(run.info.name);
  const traces = [{ ...shared, name, y: [...curve.value], line, marker: { color, size: 6 }, meta: 'values' }];
  if (alone(curve.value)) traces[0].mode = 'lines+markers';
  if (view.smoothing > 0) {
    Object.assign(traces[0], { line: { ...line, color: `${color}66` }, marker: { color: `${color}66` }, hoverinfo: 'skip' });
    traces.push({ ...shared, name, y: smoothed(curve.value, view.smoothing), line: { ...line, width: 2 }, marker: { color }, meta: 'smoothed' });
  } else if (curve.perPoint > 1) {
    const edge = { ...shared, mode: 'lines', line: { width: 0, color }, hoverinfo: 'skip', name };
    traces.unshift({ ...edge, y: [...curve.low], meta: 'low' },
      { ...edge, y: [...curve.high], fill: 'tonexty', fillcolor: `${color}33`, meta: 'high' });
  }
  if (curve.nonfinite.length) traces.push(nonfiniteTrace(run, curve, view, divisor, color));
  return traces;
}

/** Crosses where numbers are not finite, at the height of the point before. */
function nonfiniteTrace(run, curve, view, divisor, color) {
  const steps = curve.nonfinite.map(([step]) => step);
  const x = places(run, { step: steps }, view.axis) ?? [];
  const heights = steps.map(step => {
    let index = curve.step.findIndex(other => other >= step);
    if (index < 0) index = curve.step.length - 1;
    while (index > 0 && curve.value[index] === null) index--;
    return curve.value[index] ?? curve.value.find(value => value !== null) ?? 1;
  });
  return {
    type: 'scatter', mode: 'markers', name: escaped(run.info.name), x: x.map(value => value / divisor), y: heights, meta: 'nonfinite',
    text: curve.nonfinite.map(([step, what]) => `${what} at step ${step}`), hoverinfo: 'text+name',
    marker: { symbol: 'x', size: 9, color },
  };
}

/** Whether a point without neighbors would not be seen as part of a line. */
const alone = values => values.some((value, i) => value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
