// Draws the report. All numbers are in the page: see encoding.py for how the arrays are stored.

import { byId, element, inflated } from './dom.js';
import { clipped, colorOf, config, escaped, inWords, paletteColor, smoothed, themed } from './plots.js';

const BUCKETS = 1200;  // of a curve; each draws its smallest and its largest number
const MOST_MARKS = 60;  // of numbers that are not finite, and of restarts
const AXES = {step: 'step', tokens: 'tokens', flops: 'training FLOPs', time: 'time (UTC)'};

const data = JSON.parse(byId('data').textContent);
const report = {data, arrays: [], series: {}, ready: false};
window.pretraxReport = report;

// Arrays

function unplaned(bytes, offset, count, width) {
    const out = new Uint8Array(count * width);
    for (let byte = 0; byte < width; byte++) {
        const plane = offset + byte * count;
        for (let i = 0; i < count; i++) out[i * width + byte] = bytes[plane + i];
    }
    return out.buffer;
}

function decode(head, bytes, arrays) {
    const {codec, offset, count} = head, out = new Float64Array(count);
    if (codec === 'decimal') {
        const steps = new Int32Array(unplaned(bytes, offset, count, 4));
        let value = head.first;
        for (let i = 0; i < count; i++) { value += steps[i]; out[i] = value / head.scale; }
        return out;
    }
    if (codec === 'scaled') {
        const of = arrays[head.of], units = new Int8Array(bytes.buffer, bytes.byteOffset + offset, count);
        for (let i = 0; i < count; i++) out[i] = of[i] * head.factor;
        const bits = new BigInt64Array(out.buffer);
        for (let i = 0; i < count; i++) if (units[i]) bits[i] += BigInt(units[i]);
        return out;
    }
    if (codec === 'f32') {
        const buffer = unplaned(bytes, offset, count, 4);
        if (head.differences) {
            const bits = new Uint32Array(buffer);
            for (let i = 1; i < count; i++) bits[i] += bits[i - 1];
        }
        out.set(new Float32Array(buffer));
        return out;
    }
    const buffer = unplaned(bytes, offset, count, 8);
    if (head.differences) {
        const bits = new BigUint64Array(buffer);
        for (let i = 1; i < count; i++) bits[i] += bits[i - 1];
    }
    return new Float64Array(buffer);
}

// Curves

const view = {axis: 'step', smoothing: 0, log: false, clip: true, range: null};
const drawn = new Map();  // id of a chart -> function that draws it

// The tokens or FLOPs of the first steps. The sizes of the batches are [first step, tokens per step, FLOPs per token].
function trained(steps, name) {
    return data.curves.sizes.reduce((sum, [first, tokens, flops], i, sizes) => {
        const stop = i + 1 < sizes.length ? sizes[i + 1][0] : Infinity;
        return sum + Math.max(0, Math.min(steps, stop) - first) * tokens * (name === 'flops' ? flops : 1);
    }, 0);
}

function axisValues(name, lines) {
    const {curves} = data, steps = report.arrays[curves.steps];
    if (name === 'time') {
        const times = report.arrays[curves.times];
        return Float64Array.from(lines, line => times[line] * 1000);
    }
    return Float64Array.from(lines, line => name === 'step' ? steps[line] : trained(steps[line], name));
}

function xOf(key) {
    const one = report.series[key];
    one.x ??= {};
    one.x[view.axis] ??= axisValues(view.axis, one.lines);
    return one.x[view.axis];
}

// The indices from and to, without it, of the points in a range of x and one at each side of it.
function within(x, range) {
    let from = 0, to = x.length;
    if (range) {
        while (from < to && !(x[from] >= range[0])) from++;
        while (to > from && !(x[to - 1] <= range[1])) to--;
        from = Math.max(0, from - 1);
        to = Math.min(x.length, to + 1);
    }
    return [from, to];
}

// The indices to draw in a range of x: all, or the smallest and the largest number of each bucket, and one that is not finite.
function chosen(x, values, range) {
    const [from, to] = within(x, range);
    const count = to - from, indices = [];
    if (count <= 2 * BUCKETS) {
        for (let i = from; i < to; i++) indices.push(i);
        return indices;
    }
    for (let bucket = 0; bucket < BUCKETS; bucket++) {
        const start = from + Math.floor(bucket * count / BUCKETS), end = from + Math.floor((bucket + 1) * count / BUCKETS);
        let low = -1, high = -1, broken = -1;
        for (let i = start; i < end; i++) {
            if (!Number.isFinite(values[i])) broken = i;
            else {
                if (low < 0 || values[i] < values[low]) low = i;
                if (high < 0 || values[i] > values[high]) high = i;
            }
        }
        const kept = new Set([low, high, broken]);
        if (bucket === 0) kept.add(from);
        if (bucket === BUCKETS - 1) kept.add(to - 1);
        indices.push(...[...kept].filter(i => i >= 0).sort((a, b) => a - b));
    }
    return indices;
}

function xForPlotly(value) {
    return view.axis === 'time' ? new Date(value).toISOString().replace('T', ' ').replace('Z', '') : value;
}

function traces(chart) {
    return chart.keys.flatMap((key, number) => {
        const one = report.series[key], x = xOf(key), color = colorOf(number);
        const name = escaped(one.name), few = one.values.length <= 60;
        const line = (values, more) => {
            const indices = chosen(x, values, view.range);
            return {
                x: indices.map(i => xForPlotly(x[i])),
                y: indices.map(i => Number.isFinite(values[i]) ? values[i] : null),
                customdata: indices, name, legendgroup: key, mode: few ? 'lines+markers' : 'lines', type: 'scatter',
                line: {color, width: 1.7}, marker: {color, size: 6},
                hovertemplate: chart.is_fraction ? '%{y:.2%}' : '%{y:.6g}', ...more,
            };
        };
        if (!view.smoothing) return [line(one.values, {})];
        const raw = {showlegend: false, line: {color: `${color}66`, width: 1}, mode: 'lines', hoverinfo: 'skip', hovertemplate: null};
        one.smooth = one.smooth?.weight === view.smoothing ? one.smooth : {weight: view.smoothing, values: smoothed(one.values, view.smoothing)};
        return [line(one.values, raw), line(one.smooth.values, {})];
    });
}

const layout = more => themed({
    hovermode: 'x unified', legend: {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0},
    xaxis: {}, yaxis: {}, ...more,
});

function xOfStep(step, time) {
    if (view.axis === 'time') return time * 1000;
    return view.axis === 'step' ? step : trained(step, view.axis);
}

// Lines where the run continued, and where numbers are not finite.
function shapes(chart) {
    const [bad, mark, faint] = ['bad', 'mark', 'muted'].map(paletteColor);
    const vertical = (x, color, dash) => ({type: 'line', x0: xForPlotly(x), x1: xForPlotly(x), yref: 'paper', y0: 0, y1: 1, line: {color, width: 1, dash}, layer: 'below'});
    const found = data.curves.marks.slice(-MOST_MARKS).map(one =>
        vertical(xOfStep(one.step, one.time), one.kind === 'restart' ? faint : mark, one.kind === 'restart' ? 'dot' : 'dash'));
    for (const key of chart.keys) {
        const one = report.series[key], x = xOf(key);
        found.push(...one.broken.slice(0, MOST_MARKS).map(i => vertical(x[i], bad, 'solid')));
    }
    return found;
}

// The range of the y axis without values far out, and their marks; null: nothing is far out, or the reader wants to see all.
function clip(chart) {
    if (!view.clip || view.log) return null;
    const at = `${view.axis} ${view.range}`;
    if (chart.clip?.at !== at) {
        const curves = chart.keys.map(key => {
            const x = xOf(key), bounds = within(x, view.range);
            return {x: x.slice(...bounds), y: report.series[key].values.slice(...bounds)};
        });
        chart.clip = {at, found: clipped(curves, xForPlotly)};
    }
    return chart.clip.found;
}

function drawCurve(chart) {
    const few = chart.keys.every(key => report.series[key].values.length <= 2);
    const far = clip(chart);
    const made = layout({
        showlegend: chart.keys.length > 1,
        shapes: shapes(chart),
        annotations: far?.annotations ?? [],
        xaxis: {title: {text: AXES[view.axis]}, type: view.axis === 'time' ? 'date' : 'linear', exponentformat: 'SI',
            ...(view.range ? {range: view.range.map(xForPlotly), autorange: false} : {autorange: true}), ...(few ? {rangemode: 'tozero'} : {})},
        yaxis: {type: view.log ? 'log' : 'linear', tickformat: chart.is_fraction ? '.3~%' : '', exponentformat: 'SI',
            ...(far ? {range: far.range, autorange: false} : {autorange: true})},
    });
    const place = byId(chart.id);
    const isNew = !place.data;
    Plotly.react(place, [...traces(chart), ...far?.traces ?? []], made, config());
    if (isNew) place.on('plotly_relayout', zoomed);
}

function zoomed(change) {
    if (change['xaxis.autorange']) return show({range: null});
    const [from, to] = [change['xaxis.range[0]'] ?? change['xaxis.range']?.[0], change['xaxis.range[1]'] ?? change['xaxis.range']?.[1]];
    if (from === undefined || to === undefined) return undefined;
    const number = value => view.axis === 'time' ? new Date(`${String(value).replace(' ', 'T')}Z`).getTime() : Number(value);
    return show({range: [number(from), number(to)]});
}

function show(change) {
    Object.assign(view, change);
    byId('reset').hidden = !view.range;
    for (const draw of drawn.values()) draw();
}

function note(chart) {
    const parts = [];
    for (const key of chart.keys) {
        const one = report.series[key];
        const steps = one.broken.map(i => `${text(one.values[i])} at step ${report.arrays[data.curves.steps][one.lines[i]]}`);
        if (steps.length) parts.push(`${one.name}: ${steps.slice(0, 5).join(', ')}${steps.length > 5 ? ` and ${steps.length - 5} more` : ''}`);
    }
    byId(`${chart.id}-note`).textContent = parts.join('; ');
}

function text(value) {
    return Number.isNaN(value) ? 'NaN' : value > 0 ? 'infinity' : '-infinity';
}

function prepareCurves() {
    const {curves} = data;
    for (const [key, one] of Object.entries(curves.series)) {
        const values = report.arrays[one.values], broken = [];
        values.forEach((value, i) => { if (!Number.isFinite(value)) broken.push(i); });
        report.series[key] = {name: one.name, values, lines: report.arrays[one.lines], broken};
    }
    const {sizes} = curves, hasFlops = sizes.length && sizes.every(([, , flops]) => flops);
    const names = ['step', ...(sizes.length ? ['tokens'] : []), ...(hasFlops ? ['flops'] : []), ...(curves.times === null ? [] : ['time'])];
    byId('axis').append(...names.map(name => new Option(AXES[name], name)));
    byId('axis').onchange = event => show({axis: event.target.value, range: null});
    byId('smoothing').oninput = event => {
        byId('smoothing-shown').textContent = event.target.value;
        show({smoothing: Number(event.target.value)});
    };
    byId('log').onchange = event => show({log: event.target.checked});
    byId('clip').onchange = event => show({clip: event.target.checked});
    byId('reset').onclick = () => show({range: null});
    const kinds = new Set(curves.marks.map(one => one.kind));
    const marks = byId('marks');
    if (marks) marks.textContent = [
        kinds.has('restart') ? 'Dotted lines: training continued from a checkpoint.' : '',
        kinds.has('rollback') ? 'Dashed lines: the run returned to this step.' : '',
        Object.values(report.series).some(one => one.broken.length) ? 'Red lines: the number is not finite.' : '',
    ].join(' ');
    const [first, ...others] = curves.charts;
    const shown = [first, ...others.filter(chart => !saidInWords(chart))];
    shown.forEach(note);
    return shown.map(chart => [chart.id, () => drawCurve(chart)]);
}

// Replaces a chart by a line of text if that says as much; whether it did.
function saidInWords(chart) {
    const words = chart.keys.map(key => inWords(axisValues('step', report.series[key].lines), report.series[key].values, chart.is_fraction));
    if (!words.every(Boolean)) return false;
    const said = chart.keys.map((key, i) => chart.keys.length > 1 ? `${report.series[key].name}: ${words[i]}` : words[i]).join('; ');
    const figure = byId(chart.id).closest('figure');
    const name = element('th', {scope: 'row'}), value = element('td', {textContent: said});
    name.append(...figure.querySelector('figcaption h3').childNodes);
    byId('plain').append(element('tr', {}, name, value));
    figure.remove();
    return true;
}

// Layer statistics, memory, time

function drawLayers(place) {
    const one = data.layers[byId(`${place.id}-weight`)?.value ?? place.dataset.index];
    const steps = report.arrays[one.steps], values = report.arrays[one.values], rows = one.layers * one.heads;
    const z = Array.from({length: rows}, (_, row) => Array.from(steps, (_, i) => Number.isFinite(values[i * rows + row]) ? values[i * rows + row] : null));
    if (rows === 1) {  // of the whole model
        const y = Array.from(values, value => Number.isFinite(value) ? value : null);
        Plotly.react(place, [{type: 'scatter', x: Array.from(steps), y, mode: 'lines', line: {color: colorOf(0), width: 1.7}, hovertemplate: '%{y:.6g}<extra></extra>'}],
            layout({xaxis: {title: {text: 'step'}}}), config());
        return;
    }
    const names = Array.from({length: rows}, (_, row) => one.heads > 1 ? `${Math.floor(row / one.heads)}.${row % one.heads}` : `${row}`);
    Plotly.react(place, [{type: 'heatmap', x: Array.from(steps), y: names, z, colorscale: 'Viridis',
        hovertemplate: `step %{x}<br>${one.rows} %{y}<br>%{z:.4g}<extra></extra>`, colorbar: {thickness: 12}}],
        layout({hovermode: 'closest', xaxis: {title: {text: 'step'}}, yaxis: {title: {text: one.rows}, type: 'category'}}), config());
}

// A bar for each of `rows`, [bar, length, name, color]; those of one bar are stacked.
function drawBars(place, rows, unit, title) {
    const data = rows.map(([y, x, name, color]) => ({type: 'bar', orientation: 'h', y: [y], x: [x], name: escaped(name), marker: {color},
        hovertemplate: `%{x:.4s}${unit}<extra>%{fullData.name}</extra>`}));
    Plotly.react(byId(place), data, layout({barmode: 'stack', hovermode: 'closest', showlegend: true, legend: {orientation: 'h', y: -0.32, yanchor: 'top', traceorder: 'normal'},
        margin: {l: 90, r: 20, t: 10, b: 90}, xaxis: {title: {text: title}, exponentformat: 'SI'}, yaxis: {autorange: 'reversed'}}), config());
}

function drawMemory() {
    const {planned, compiled, peak, limit} = data.memory;
    const rows = Object.entries(planned).sort((a, b) => b[1] - a[1]).map(([name, bytes], i) => ['planned', bytes, name, colorOf(i)]);
    if (compiled) rows.push(['compiled', compiled, 'compiled', '#7f8c99']);
    if (peak) rows.push(['measured', peak, 'measured', '#5b6470']);
    // The limit only if the others would still be visible beside it.
    const largest = Math.max(compiled ?? 0, peak ?? 0, Object.values(planned).reduce((a, b) => a + b, 0));
    const shown = limit && limit < 20 * largest;
    if (shown) rows.push(['available', limit, 'available', paletteColor('line')]);
    drawBars('memory-chart', rows, 'B', 'bytes');
}

function drawTime() {
    const {measured, limit, phases, traced} = data.time;
    const rows = phases.map((phase, i) => ['predicted', phase.exposed, phase.name, colorOf(i)]);
    rows.push(...Object.entries(traced).map(([name, seconds], i) => ['traced', seconds, `traced: ${name}`, colorOf(i)]));
    if (measured) rows.push(['measured', measured, 'measured, median', '#5b6470']);
    if (limit) rows.push(['limit', limit, 'limit, MFU 1', '#7f8c99']);
    drawBars('time-chart', rows, 's', 'seconds per step');
}

// Mesh

// The two last axes are a grid; the others are groups around it.
function meshPicture(axes, devices) {
    if (axes.length > 2) {
        const [[name, count], ...inner] = axes, each = devices.length / count;
        return element('div', {}, ...Array.from({length: count}, (_, i) =>
            element('div', {className: 'group'}, element('div', {className: 'name', textContent: `${name} = ${i}`}), meshPicture(inner, devices.slice(i * each, (i + 1) * each)))));
    }
    const [rowName] = axes.length > 1 ? axes[0] : [''], [columnName, columns] = axes.at(-1) ?? ['', 1];
    const grid = element('div', {className: 'cells'});
    grid.style.gridTemplateColumns = `${rowName ? 'auto ' : ''}repeat(${columns}, minmax(2.1rem, max-content))`;
    if (columnName) {
        if (rowName) grid.append(element('span', {}));
        grid.append(...Array.from({length: columns}, (_, i) => element('span', {className: 'axis', textContent: `${columnName} = ${i}`})));
    }
    devices.forEach(([device, process], i) => {
        if (rowName && i % columns === 0) grid.append(element('span', {className: 'axis', textContent: `${rowName} = ${i / columns}`}));
        const cell = element('span', {className: 'cell', textContent: device, title: `device ${device}, process ${process}`});
        cell.style.background = `hsl(${(205 + 137.5 * process) % 360} 55% 72%)`;
        grid.append(cell);
    });
    return grid;
}

// Samples, configuration, definitions

function prepareSamples() {
    const prompts = [...new Set(data.samples.map(one => one.prompt))];
    byId('prompt').append(...prompts.map(prompt => new Option(JSON.stringify(prompt), prompt)));
    const ofPrompt = () => data.samples.filter(one => one.prompt === prompts[byId('prompt').selectedIndex]);
    const showSample = () => {
        const one = ofPrompt()[Number(byId('sample-step').value)];
        const starts = one.text.startsWith(one.prompt);
        byId('sample-shown').textContent = one.step;
        byId('sample').replaceChildren(element('span', {className: 'prompt', textContent: starts ? one.prompt : ''}), starts ? one.text.slice(one.prompt.length) : one.text);
    };
    const choose = () => {
        const last = ofPrompt().length - 1;
        Object.assign(byId('sample-step'), {max: last, value: last, hidden: !last});
        showSample();
    };
    byId('prompt').closest('label').hidden = prompts.length === 1;
    byId('prompt').onchange = choose;
    byId('sample-step').oninput = showSample;
    choose();
}

function prepareSettings() {
    const rows = [...byId('settings').tBodies[0].rows];
    const filter = () => {
        const words = byId('search').value.toLowerCase().split(/\s+/), showsAll = byId('show-defaults').checked || words[0];
        let count = 0;
        for (const row of rows) {
            const text = row.textContent.toLowerCase(), isDefault = row.cells[2].textContent === 'default';
            row.hidden = (isDefault && !showsAll) || !words.every(word => text.includes(word));
            count += !row.hidden;
        }
        byId('found').textContent = `${count} of ${rows.length}`;
    };
    byId('search').oninput = byId('show-defaults').onchange = filter;
    filter();
}

for (const form of document.forms) form.onsubmit = () => false;

// Folded parts: an address that ends in the name of a part opens it, and the address says which was opened last.
function prepareFolds() {
    const openNamed = () => {
        const place = location.hash ? byId(decodeURIComponent(location.hash.slice(1))) : null;
        const fold = place?.closest('.fold');
        if (fold) {
            fold.open = true;
            place.scrollIntoView();
        }
    };
    openNamed();
    addEventListener('hashchange', openNamed);
    for (const fold of document.querySelectorAll('.fold')) {
        fold.querySelector('summary').addEventListener('click', event => {
            if (!event.target.closest('.info') && !fold.open) history.replaceState(null, '', `#${fold.id}`);
        });
    }
    if (byId('settings-of-curves')) byId('settings-of-curves').open = matchMedia('(min-width: 700px)').matches;
}

// Charts are drawn when they come into view, and all before printing.
function prepareCharts(charts) {
    const waiting = new Map(charts);
    const draw = id => {
        const how = waiting.get(id);
        if (!how) return;
        waiting.delete(id);
        drawn.set(id, how);
        how();
    };
    const watcher = new IntersectionObserver(entries => {
        for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target.id); }
    }, {rootMargin: '300px'});
    for (const id of waiting.keys()) watcher.observe(byId(id));
    report.drawAll = () => {
        for (const fold of document.querySelectorAll('.fold')) fold.open = true;
        [...waiting.keys()].forEach(draw);
    };
    addEventListener('beforeprint', report.drawAll);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => show({}));
}

async function start() {
    prepareFolds();
    if (byId('settings')) prepareSettings();
    if (data.samples.length) prepareSamples();
    if (data.mesh && byId('mesh')) byId('mesh').append(meshPicture(Object.entries(data.mesh.axes), data.mesh.devices));
    const [script, bytes] = await Promise.all([inflated(byId('plotly').textContent), inflated(data.numbers.content)]);
    document.head.append(element('script', {textContent: new TextDecoder().decode(script)}));
    for (const head of data.numbers.arrays) report.arrays.push(decode(head, bytes, report.arrays));
    const charts = byId('curves') ? prepareCurves() : [];
    for (const place of document.querySelectorAll('.plot.layer')) {
        charts.push([place.id, () => drawLayers(place)]);
        byId(`${place.id}-weight`)?.addEventListener('change', () => drawLayers(place));
    }
    if (data.memory) charts.push(['memory-chart', drawMemory]);
    if (data.time) charts.push(['time-chart', drawTime]);
    prepareCharts(charts);
    report.ready = true;
}

start().catch(error => {
    byId('problem').textContent = `The curves cannot be drawn: ${error.message}. This page needs a browser of 2024 or later.`;
    byId('problem').hidden = false;
});
