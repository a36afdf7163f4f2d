// Draws the figures of the page in its colors. Zooming in one zooms all that have the same x axis.

import { byId } from './dom.js';
import { COLORS, clipped, colorOf, config, themed } from './plots.js';

const figures = JSON.parse(byId('figures').textContent);
const places = [...document.querySelectorAll('.plot')];

/** A color of the figure as it is on this ground; it may end with an opacity. */
function adapted(color) {
  const number = COLORS.light.indexOf(color.slice(0, 7));
  return number < 0 ? color : colorOf(number) + color.slice(7);
}

function draw(figure, place) {
  const { data, layout } = structuredClone(figure);
  for (const { line, marker } of data) {
    for (const drawn of [line, marker]) if (typeof drawn?.color === 'string') drawn.color = adapted(drawn.color);
  }
  const far = layout.yaxis.type === 'log' ? null : clipped(data.filter(({ meta }) => meta === 'values'));
  if (far) byId('controls').hidden = false;
  if (far && byId('clip').checked) {
    Object.assign(layout.yaxis, { range: far.range });
    layout.annotations = [...layout.annotations ?? [], ...far.annotations];
    data.push(...far.traces);
  }
  Plotly.react(place, data, themed({ legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom' }, ...layout }), config());
}

function drawAll() {
  for (const [number, figure] of figures.entries()) draw(figure, places[number]);
}

function zoomTogether(figure, place) {
  place.on('plotly_relayout', change => {
    const from = change['xaxis.range[0]'] ?? change['xaxis.range']?.[0];
    if (from === undefined && !change['xaxis.autorange']) return;
    const range = place.layout.xaxis.range.slice();
    figures.forEach((other, number) => {
      const { xaxis } = places[number].layout;
      const isSame = other !== figure && other.layout.xaxis.title?.text === figure.layout.xaxis.title?.text;
      if (isSame && String(xaxis.range) !== String(range)) Plotly.relayout(places[number], from === undefined ? { 'xaxis.autorange': true } : { 'xaxis.range': range });
    });
  });
}

drawAll();
for (const [number, figure] of figures.entries()) zoomTogether(figure, places[number]);
byId('clip').onchange = drawAll;
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
