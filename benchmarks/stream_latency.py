"""How much the server adds to the time of a token: 64 streams on an engine without a model.

    python benchmarks/stream_latency.py [--streams 64] [--block-ms 20]

The engine is that of the server's tests. It notes when a block ends; the client, a process of its own, notes when each
event arrives. The difference is what the server adds: decoding, JSON, and the way through the event loop and the
socket.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / 'tests'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--streams', type=int, default=64)
    parser.add_argument('--tokens', type=int, default=1600, help='of each stream')
    parser.add_argument('--block-ms', type=float, default=20, help='that the engine takes for a block of 8 tokens')
    options = parser.parse_args()
    command = [sys.executable, TESTS / 'serve' / 'stub_engine.py', '--no-chat', '--timed', '--slots',
    str(options.streams),
               '--seconds', str(options.block_ms / 1000), '--block', '8']  # fmt: skip
    environment = os.environ | {'PYTHONPATH': str(TESTS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout
        try:
            port = int(server.stdout.readline().rpartition(':')[2])
            seconds = sorted(asyncio.run(measure(port, options.streams, options.tokens)))
        finally:
            server.terminate()
    at = [seconds[min(int(len(seconds) * share), len(seconds) - 1)] * 1000 for share in (0.5, 0.9, 0.99)]
    print(f'{len(seconds):,} events of {options.streams} streams, a block each {options.block_ms:g} ms')
    print(
        f'added latency in ms: median {at[0]:.2f}, p90 {at[1]:.2f}, p99 {at[2]:.2f}, mean '
        f'{statistics.mean(seconds) * 1000:.2f}'
    )


async def measure(port: int, streams: int, tokens: int) -> list[float]:
    """Seconds from the end of a block to the arrival of its event."""
    found = await asyncio.gather(*(one_stream(port, tokens) for _ in range(streams)))
    return [seconds for stream in found for seconds in stream]


async def one_stream(port: int, tokens: int) -> list[float]:
    """The engine's `weights_step` is the time of the block, in microseconds; the server writes it into each event."""
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    body = f'{{"prompt": "x", "max_tokens": {tokens}, "stream": true}}'
    writer.write(
        f'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}'.encode()
    )
    found = []
    async for line in reader:
        now = time.monotonic()
        if line.startswith(b'data: {'):
            found.append(now - int(line.partition(b'"step-')[2].partition(b'"')[0]) / 1e6)
        if b'[DONE]' in line:
            break
    writer.close()
    return found[len(found) // 5 :]  # without the start, when connections are made


if __name__ == '__main__':
    main()
