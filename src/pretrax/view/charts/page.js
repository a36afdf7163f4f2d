// Draws the figure of the page in the colors of the page.

import { byId } from './dom.js';
import { COLORS, CONFIG, colorOf, themed } from './plots.js';

const figure = JSON.parse(byId('figure').textContent);

/** A color of the figure as it is on this ground; it may end with an opacity. */
function adapted(color) {
  const number = COLORS.light.indexOf(color.slice(0, 7));
  return number < 0 ? color : colorOf(number) + color.slice(7);
}

function draw() {
  const { data, layout } = structuredClone(figure);
  for (const { line, marker } of data) {
    for (const drawn of [line, marker]) if (typeof drawn?.color === 'string') drawn.color = adapted(drawn.color);
  }
  Plotly.react('chart', data, themed({ showlegend: true, ...layout }), CONFIG);
}

draw();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
