// The stream of events: it is opened again whenever it ends, and continues after the last event that is known.

import { events } from './events.js';

const SILENCE = 8_000; // milliseconds without anything, though the server sends its time every 2 s
const PAUSES = [250, 500, 1000, 2000]; // before each new attempt; the last one again and again

const KEY = `pretrax.key.${new URL('.', document.baseURI)}`;

/**
 * Follows the server for ever. `actions`: event(type, data), state('live' | 'lost', since), askForKey(): a promise of a key.
 */
export async function follow(actions) {
  let lastId = '';
  let failures = 0;
  while (true) {
    try {
      for await (const { type, data, id } of open(lastId)) {
        failures = 0;
        actions.event(type, JSON.parse(data));
        lastId = id || lastId;
        actions.state('live');
      }
    } catch (error) {
      if (error.status === 401) {
        sessionStorage.setItem(KEY, await actions.askForKey());
        continue;
      }
      if (error instanceof SyntaxError) lastId = ''; // a torn event: everything again
    }
    actions.state('lost');
    await new Promise(resolve => setTimeout(resolve, PAUSES[Math.min(failures++, PAUSES.length - 1)]));
  }
}

async function* open(lastId) {
  const control = new AbortController();
  let timer;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => control.abort(), SILENCE);
  };
  wait();
  try {
    const headers = lastId ? { 'last-event-id': lastId } : {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch('events', { headers, signal: control.signal, cache: 'no-store' });
    if (!response.ok) throw Object.assign(new Error(response.statusText), { status: response.status });
    const watched = response.body.pipeThrough(new TransformStream({
      transform(piece, controller) {
        wait();
        controller.enqueue(piece);
      },
    }));
    yield* events(watched);
  } finally {
    clearTimeout(timer);
    control.abort();
  }
}
