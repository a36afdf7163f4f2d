"""The server of benchmarks/serve.py's part latency: a stub engine that notes when each block ended.

It prints its port, serves until its input ends, and prints for each prompt the times of its tokens.
"""

import collections
import json
import sys
import time
from pathlib import Path


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / 'tests')  # this directory has another `serve`
    from serve.stub_engine import Running, stub_service  # type: ignore[import-not-found]

    slots, seconds = int(sys.argv[1]), float(sys.argv[2])
    service = stub_service(chat=False, slots=slots, block=1, seconds=seconds)
    with Running(service) as server:
        engine, prompts = server.engine, {}
        engine.script = list(b'token ')
        ended = collections.defaultdict(list)
        plain_add, plain_step = engine.add, engine.step

        def add(request):
            number = plain_add(request)
            prompts[number] = request.prompt[0]
            return number

        def step():
            updates = plain_step()
            now = time.perf_counter()
            for update in updates:
                ended[prompts[update.number]] += [now] * len(update.tokens)
            return updates

        engine.add, engine.step = add, step
        print(server.port, flush=True)
        sys.stdin.read()
        print(json.dumps(ended), flush=True)


if __name__ == '__main__':
    main()
