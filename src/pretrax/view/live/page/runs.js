// What is known of the runs. Events change it; see src/pretrax/view/live/run.py.

export class Runs {
  constructor() {
    this.byId = new Map(); // {info, curves: Map of key to curve, samples}
    this.definitions = {}; // key: [name, unit, meaning]
    this.about = { ids: [], hidden: 0, problem: '', where: '' };
    this.ahead = 0; // seconds that the clock of the server is ahead of this one
  }

  get list() {
    return this.about.ids.map(id => this.#run(id));
  }

  get now() {
    return Date.now() / 1000 + this.ahead;
  }

  /** Applies an event, and returns the keys of the curves that it changes. */
  apply(type, data) {
    if (type === 'time') this.ahead = data.now - Date.now() / 1000;
    if (type === 'definitions') Object.assign(this.definitions, data);
    if (type === 'run') this.#run(data.id).info = data;
    if (type === 'samples') this.#run(data.id).samples = data.samples;
    if (type === 'curves') return this.#curves(this.#run(data.id).curves, data);
    if (type === 'runs') {
      this.about = data;
      for (const id of this.byId.keys()) if (!data.ids.includes(id)) this.byId.delete(id);
      return this.keys();
    }
    return [];
  }

  /** The keys of all curves, in the order in which they appeared. */
  keys() {
    return [...new Set(this.list.flatMap(run => [...run.curves.keys()]))].filter(key => key !== 'time');
  }

  #run(id) {
    if (!this.byId.has(id)) this.byId.set(id, { id, info: { id, name: id, last: {}, attempts: [], warnings: [] }, curves: new Map(), samples: [] });
    return this.byId.get(id);
  }

  #curves(curves, { keys, only }) {
    const changed = Object.keys(keys);
    for (const [key, change] of Object.entries(keys)) {
      const curve = curves.get(key) ?? { step: [], value: [], low: [], high: [] };
      if (change.start > curve.step.length) continue; // older than what is known: a newer event follows
      curve.perPoint = change.per_point;
      curve.nonfinite = change.nonfinite;
      for (const name of ['step', 'value', 'low', 'high']) {
        curve[name].length = Math.min(change.start, curve[name].length);
        for (const one of change[name]) curve[name].push(one);
      }
      curves.set(key, curve);
    }
    for (const key of only ? curves.keys() : []) {
      if (!only.includes(key)) {
        curves.delete(key);
        changed.push(key);
      }
    }
    return changed.includes('time') || changed.includes('tokens') ? this.keys() : changed;
  }
}

/** The x of each point of a curve of a run; null: the run does not know it. `time`: in seconds since its first line. */
export function places(run, curve, axis) {
  if (axis === 'step') return curve.step;
  const base = run.curves.get(axis);
  if (!base?.step.length) return null;
  const ends = base.perPoint > 1 ? base.high : base.value; // tokens and time grow: the highest number is the last
  const first = axis === 'time' ? ends[0] : 0;
  return curve.step.map(step => at(base.step, ends, step) - first);
}

/** The value at a step, or on the line between its neighbors. */
function at(steps, values, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  if (steps[low] === step || low === 0) return values[low];
  const share = (step - steps[low - 1]) / (steps[low] - steps[low - 1]);
  return values[low - 1] + Math.min(share, 1) * (values[low] - values[low - 1]);
}
