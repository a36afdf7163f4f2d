// What all figures of Plotly share: colors, layout, texts, averages, and what is done about values far out.

export const COLORS = { // Okabe and Ito 2008 as in view/charts/chart.py, and the same on a dark ground
  light: ['#0072b2', '#d55e00', '#00805f', '#b3598d', '#a87000', '#2f8fc4', '#5b5f6b', '#7a5cc0'],
  dark: ['#62b5ef', '#ff8a3d', '#37c99a', '#e59cc6', '#eab53c', '#9ad4ff', '#c3c7d1', '#b9a5f5'],
};

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen === 'dark' || (chosen !== 'light' && matchMedia('(prefers-color-scheme: dark)').matches);
};

export const colorOf = number => COLORS[isDark() ? 'dark' : 'light'][number % COLORS.light.length];

/** A color of palette.css by its name: 'ink'. */
export function paletteColor(name) {
  document.head.style.color = `var(--${name})`;
  return getComputedStyle(document.head).color;
}

const isSmall = () => matchMedia('(max-width: 700px), (pointer: coarse)').matches;

/** A layout with the look of the page, where it does not have its own. On a touch screen a finger scrolls and does not zoom. */
export function themed(layout) {
  const [ink, muted, line, sheet] = ['ink', 'muted', 'line', 'sheet'].map(paletteColor);
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true, tickfont: { color: muted, size: 11 } };
  const named = name => ({ ...axis, ...layout[name], ...(layout[name].title ? { title: { standoff: 8, ...layout[name].title, font: { color: muted, size: 12 } } } : {}) });
  const axes = Object.keys(layout).filter(name => /^[xy]axis/.test(name)).map(name => [name, named(name)]);
  return {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false, hovermode: 'x', dragmode: isSmall() ? false : 'zoom',
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily }, margin: { l: 48, r: 12, t: 28, b: 40 },
    hoverlabel: { bgcolor: sheet, bordercolor: line, font: { color: ink }, namelength: -1 },
    modebar: { bgcolor: 'rgba(0,0,0,0)', color: line, activecolor: ink }, ...layout, ...Object.fromEntries(axes),
  };
}

/** The settings of a figure: its tool bar is above the curves, where there is room for it, and is left out on small screens. */
export const config = (more = {}) => ({
  responsive: true, displaylogo: false, displayModeBar: isSmall() ? false : 'hover', modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'], ...more,
});

// Values that would flatten the others

const MOST = 101; // values of a curve that count, at equal distances in their order
const FENCE = 3; // interquartile ranges beyond the quartiles: "far out" of Tukey 1977, Exploratory Data Analysis, section 2D
const NEAR = 2; // what is within so many ranges of the values inside of the fence belongs to them
const WORTH = 10; // the range of all values must be so many times that of the others: they would have a tenth of the height

/**
 * The range of the y axis without values so far out that they would flatten the others, and marks at their places.
 *
 * `curves`: [{x, y}] that share a linear axis, x as numbers; long curves count the same, however many points they have. `toPlotly`: an x as
 * Plotly takes it. Returns null if nothing is far out, and otherwise {range, outside: number of points, traces, annotations}, which a
 * figure adds to its own.
 */
export function clipped(curves, toPlotly = x => x) {
  const finite = curves.map(({ y }) => Float64Array.from(y.filter(Number.isFinite))).filter(({ length }) => length);
  const sample = Float64Array.from(finite.flatMap(values => {
    const sorted = values.toSorted();
    const count = Math.min(MOST, sorted.length);
    return Array.from({ length: count }, (_, i) => sorted[Math.round(i / Math.max(count - 1, 1) * (sorted.length - 1))]);
  })).sort();
  const quartile = part => sample[Math.round(part / 4 * (sample.length - 1))];
  const reach = FENCE * (quartile(3) - quartile(1));
  if (!(reach > 0)) return null;
  const extent = (from, to) => {
    const range = [Infinity, -Infinity];
    for (const values of finite) {
      for (const value of values) {
        if (value < from || value > to) continue;
        if (value < range[0]) range[0] = value;
        if (value > range[1]) range[1] = value;
      }
    }
    return range;
  };
  const grown = ([low, high], part) => [low - part * (high - low), high + part * (high - low)];
  const all = extent(-Infinity, Infinity);
  const near = extent(quartile(1) - reach, quartile(3) + reach);
  const inner = extent(...grown(near, NEAR)); // the beginning of a loss is not cut for the sake of a point far above it
  if (!(all[1] - all[0] > WORTH * (inner[1] - inner[0]))) return null;
  const range = grown(inner, 0.06);
  return { range, ...marks(curves, range, toPlotly) };
}

/** A triangle at the edge for each group of neighbors outside of a range, and at each edge how many there are. */
function marks(curves, range, toPlotly) {
  const color = paletteColor('warn');
  const ends = curves.filter(({ x }) => x.length).flatMap(({ x }) => [x[0], x.at(-1)]);
  const [left, right] = [Math.min(...ends), Math.max(...ends)];
  const found = { outside: 0, traces: [], annotations: [] };
  for (const side of [-1, 1]) {
    const edge = side < 0 ? range[0] : range[1];
    const points = [];
    for (const { x, y } of curves) {
      for (const [i, value] of y.entries()) if (Number.isFinite(value) && side * (value - edge) > 0) points.push([x[i], value]);
    }
    if (!points.length) continue;
    points.sort(([a], [b]) => a - b);
    const groups = [];
    for (const point of points) {
      if (groups.length && point[0] - groups.at(-1).at(-1)[0] <= 0.02 * (right - left)) groups.at(-1).push(point);
      else groups.push([point]);
    }
    const farthest = group => group.reduce((far, point) => side * (point[1] - far[1]) > 0 ? point : far);
    const words = group => {
      const [count, where] = group.length === 1 ? ['1 point', 'at'] : [`${group.length.toLocaleString('en')} points`, side > 0 ? 'up to' : 'down to'];
      return `${count} outside, ${where} ${numberText(farthest(group)[1])}`;
    };
    found.outside += points.length;
    found.traces.push({
      type: 'scatter', mode: 'markers', x: groups.map(group => toPlotly(farthest(group)[0])), y: groups.map(() => edge), text: groups.map(words),
      hovertemplate: '%{text}<extra></extra>', showlegend: false, cliponaxis: false, meta: 'outside', name: '',
      marker: { symbol: side > 0 ? 'triangle-up' : 'triangle-down', size: 9, color },
    });
    const [x] = farthest(points);
    const isLate = x > (left + right) / 2;
    found.annotations.push({
      x: toPlotly(x), y: edge, text: words(points), showarrow: false, font: { color, size: 11 },
      xanchor: isLate ? 'right' : 'left', xshift: isLate ? -8 : 8, yanchor: side > 0 ? 'top' : 'bottom',
    });
  }
  return found;
}

// Curves that a line of text says as well

/** A number as a person reads it: six digits at most, a fraction in percent. */
export function numberText(value, isFraction = false) {
  if (isFraction) return `${Number((100 * value).toPrecision(4))} %`;
  const rounded = Number(value.toPrecision(6));
  return Math.abs(rounded) >= 1e-4 && Math.abs(rounded) < 1e15 || rounded === 0 ? rounded.toLocaleString('en', { maximumSignificantDigits: 6 }) : rounded.toExponential();
}

/** What there is to say of a curve that is constant or a straight line over its steps; '' if it must be seen. */
export function inWords(x, y, isFraction = false) {
  const places = Array.from(y, (_, i) => i).filter(i => Number.isFinite(y[i]));
  if (!places.length) return 'no number that is finite';
  const first = places[0];
  const last = places.at(-1);
  const [from, to] = [numberText(y[first], isFraction), numberText(y[last], isFraction)];
  if (places.length === 1) return `${from} at step ${numberText(x[first])}`;
  if (places.length < y.length) return '';
  if (places.every(i => y[i] === y[first])) return `constant at ${from}`;
  if (places.length === 2) return '';
  const slope = (y[last] - y[first]) / (x[last] - x[first]);
  const least = 1e-6 * Math.abs(y[last] - y[first]);
  const isStraight = places.every(i => Math.abs(y[i] - y[first] - slope * (x[i] - x[first])) <= least);
  return isStraight ? `a straight line from ${from} to ${to}` : '';
}

/** Plotly reads a part of HTML in texts, and a formula between dollar signs. */
export const escaped = text => String(text).replace(/[&<>$]/g, one => `&#${one.charCodeAt(0)};`);

/**
 * Exponential moving average, corrected for its start as in Kingma and Ba 2015, arXiv:1412.6980, section 3. It leaves out
 * what is not a finite number: null in its place.
 */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return Array.from(values, value => {
    if (!Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
