// What all figures of Plotly share: colors, texts and averages.

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

/** A layout with the look of the page, where it does not have its own. */
export function themed(layout) {
  const [ink, line, sheet] = ['ink', 'line', 'sheet'].map(paletteColor);
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  const axes = Object.keys(layout).filter(name => /^[xy]axis/.test(name)).map(name => [name, { ...axis, ...layout[name] }]);
  return {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false, hovermode: 'x',
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: sheet, bordercolor: line, font: { color: ink }, namelength: -1 },
    modebar: { bgcolor: 'rgba(0,0,0,0)', color: line, activecolor: ink }, ...layout, ...Object.fromEntries(axes),
  };
}

export const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d'] };

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
