// A server with the API of OpenAI: its models, and answers as they are written.

// A second server is asked only if the first one's Content-Security-Policy names it in `connect-src` and the second one's
// CORS headers name the origin of this page: `pretrax serve --allow-origin ORIGIN` does both.

import { events } from './events.js';

export class ServerError extends Error {
  /** `status` is that of the response; 0: there was none, or it broke off. `code`: the server's name of the error. */
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const TEMPLATE = 512; // tokens that a chat template, or the beginning of a text, may add

const LOST = 'The connection to the server was lost.';

export class Server {
  /** `address`: '' for the server that this page comes from. */
  constructor(address = '') {
    const base = address ? `${address.replace(/\/+(v1\/*)?$/, '')}/` : '.';
    this.url = new URL(base, document.baseURI);
    this.name = address ? this.url.host : '';
  }

  get key() {
    return sessionStorage.getItem(`pretrax.key.${this.url}`) ?? '';
  }

  set key(value) {
    sessionStorage.setItem(`pretrax.key.${this.url}`, value);
  }

  async models() {
    const response = await this.#fetch('v1/models', { signal: AbortSignal.timeout(10_000) });
    const { data } = await response.json();
    return data.map(model => ({
      id: model.id,
      step: model.step ?? null,
      maxLength: model.max_model_len ?? null,
      chat: model.chat === true,
    }));
  }

  /**
   * Parts of an answer of one of the `models` as `{text, tokens, finish, step, usage}`, each as far as it is known. The
   * first has `read`: how many tokens at the end of the text were read, if not all of it.
   */
  async *stream({ id, maxLength }, request, signal) {
    const path = request.messages ? 'v1/chat/completions' : 'v1/completions';
    const whole = { model: id, ...request, stream: true, stream_options: { include_usage: true } };
    const fitting = await this.#fitting(whole, maxLength, signal);
    const response = await this.#post(path, fitting, signal);
    yield { text: '', tokens: [], finish: null, step: null, usage: null, read: fitting.prompt === whole.prompt ? null : fitting.prompt.length };
    let finished = false;
    for await (const event of answers(response.body)) {
      if (event === '[DONE]') return;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new ServerError(chunk.error.message, 500, chunk.error.code);
      const choice = chunk.choices?.[0];
      finished ||= Boolean(choice?.finish_reason);
      yield {
        text: choice?.text ?? choice?.delta?.content ?? '',
        tokens: tokensOf(choice?.logprobs),
        finish: choice?.finish_reason ?? null,
        step: stepOf(chunk.system_fingerprint),
        usage: chunk.usage ?? null,
      };
    }
    if (!finished) throw new ServerError(LOST);
  }

  /**
   * The request, for as many tokens as a model that reads `most` tokens has room for. A text that leaves less than a
   * quarter of them, and less than is asked for, is read from its middle on. A chat is never cut: without room, the server says so.
   */
  async #fitting(request, most, signal) {
    const { model, prompt, messages, max_tokens: wanted, continue_final_message = false } = request;
    const size = new TextEncoder().encode(prompt ?? JSON.stringify(messages)).length; // a token has a byte or more
    if (most === null || size + wanted + TEMPLATE <= most) return request;
    const text = messages ? { messages, continue_final_message } : { prompt };
    const response = await this.#post('tokenize', { model, ...text }, signal);
    const { tokens } = await response.json();
    const room = most - tokens.length;
    if (messages || room >= Math.min(wanted, most / 4)) return { ...request, max_tokens: Math.max(1, Math.min(wanted, room)) };
    const read = tokens.slice(-Math.ceil(most / 2));
    return { ...request, prompt: read, max_tokens: Math.min(wanted, most - read.length) };
  }

  #post(path, body, signal) {
    const headers = { 'Content-Type': 'application/json' };
    return this.#fetch(path, { method: 'POST', body: JSON.stringify(body), signal, headers });
  }

  async #fetch(path, options) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, this.url), { ...options, headers });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ServerError(this.name ? `${this.name} does not answer.` : 'The server does not answer.');
    }
    if (response.ok) return response;
    const answer = await response.json().catch(() => null);
    const message = answer?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
    throw new ServerError(message, response.status, answer?.error?.code);
  }
}

/** The data of the events of an answer. */
async function* answers(body) {
  try {
    for await (const { data } of events(body)) yield data;
  } catch (error) {
    throw error.name === 'AbortError' ? error : new ServerError(LOST);
  }
}

/** Tokens as `{text, offset, logprob, top: [[text, logprob]]}` from both forms of OpenAI's log probabilities. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(token => ({
      text: token.token, offset: null, logprob: token.logprob,
      top: token.top_logprobs.map(other => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text, offset: logprobs.text_offset[i], logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
}

/** The last training step in a fingerprint such as step-1200..1300; null: it has none. */
function stepOf(fingerprint) {
  const found = /^step-(?:\d+\.\.)?(\d+)$/.exec(fingerprint ?? '');
  return found && Number(found[1]);
}
