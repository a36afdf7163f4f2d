// Server-sent events of a response that `fetch` got. EventSource cannot send a key.

/** Events as `{type, data, id}`; id: '' if it has none. A character may be split between two pieces of the body. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  let event = { type: 'message', data: '', id: '' };
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split('\n');
      rest = lines.pop();
      for (const line of lines) {
        const [, field, content] = /^(event|data|id): ?(.*)$/.exec(line) ?? [];
        if (field) event[field === 'event' ? 'type' : field] = content.trim();
        else if (!line.trim()) {
          if (event.data) yield event;
          event = { type: 'message', data: '', id: '' };
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed or broken
  }
}
