// One figure for each key, with the curves of all runs.

import { button, element } from './dom.js';
import { COLORS, colorOf, config, escaped, smoothed, themed } from './plots.js';
import { places } from './runs.js';

const DASHES = ['solid', 'dash', 'dot', 'dashdot'];
export const FRACTION = 'fraction of 1';

export class Charts {
  /** `view()`: {runs: [[run, number]], axis, smoothing, logX, logY} of what is to be drawn. */
  constructor(root, definitionOf, view) {
    this.root = root;
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
  }

  /** Draws the figures of these keys again, if they are in view, and otherwise when they come into view. */
  changed(keys) {
    for (const key of keys) this.stale.add(key);
    this.#drawSoon();
  }

  #add(key) {
    const [name, unit, meaning] = this.definitionOf(key);
    const id = `meaning-${this.byKey.size}-${Math.random().toString(36).slice(2)}`;
    const explained = element('p', { className: 'meaning', id, hidden: true }, `${key}: ${meaning}`);
    const help = button('?', () => {
      explained.hidden = !explained.hidden;
      help.ariaExpanded = String(!explained.hidden);
    }, { className: 'quiet help', label: `What ${name} means` });
    help.ariaExpanded = 'false';
    help.setAttribute('aria-controls', id);
    const plot = element('div', { className: 'plot' });
    const section = element('section', { className: 'chart', label: name },
      element('h3', {}, name, ' ', element('span', { className: 'unit' }, unit === FRACTION ? '' : unit), help), explained, plot);
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
    Plotly.react(plot, traces, themed({
      height: 260, margin: { l: 54, r: 14, t: 6, b: 42 }, uirevision: 'kept',
      xaxis: { type: view.logX ? 'log' : 'linear', title: { text: xTitle, standoff: 8, font: { size: 12 } } },
      yaxis: { type: view.logY ? 'log' : 'linear', tickformat: unit === FRACTION ? '.3~%' : '', exponentformat: largest < 0.01 ? 'e' : 'SI' },
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
