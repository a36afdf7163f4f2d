"""TensorBoard: event files in the directory `tb` of a run."""

import itertools
import json
import os
import pathlib
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pretrax.observe.trackers.base import Line, Shown, Table, Tracker, markdown_code, markdown_table, needs

_TEXT = '/text_summary'  # what tensorboardX adds to the name of a text
# Bytes after which a file is followed by the next: in a bucket, a growing file is uploaded as a whole.
LARGEST = 1 << 20


class TensorBoard(Tracker):
    """Writes event files. An event `SessionLog.START` makes TensorBoard forget later steps of earlier files."""

    name, package = 'TensorBoard', 'tensorboardX'

    def __init__(self, choice: str | bool, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        del choice, name
        directory = directory / 'tb'
        needs(self.package, 'tensorboard')
        # Not its SummaryWriter, whose `flush` does not wait for its queue.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        directory.mkdir(parents=True, exist_ok=True)
        self._earlier = sorted(directory.glob('events.out.tfevents.*'))
        # TensorBoard reads the files in the order of their names: the time in seconds, the host, this number.
        numbers = itertools.count(len(self._earlier))
        self._open = lambda: EventsWriter(str(directory / 'events'), f'.{next(numbers):06d}.{os.getpid()}')
        self._writer, self._size = self._open(), 0
        # The classes of the protocol buffers are made when they are imported.
        self._event_types: Any = event_pb2
        self._summary_types: Any = summary_pb2
        self._summary: Any = summary
        self._config = config
        self.where = f'tensorboard --logdir {directory}'

    def resume(self, step: int) -> Mapping[str, int]:
        newest: dict[str, int] = {}
        for event in self._events():
            if event.HasField('session_log'):
                newest = {key: min(known, event.step - 1) for key, known in newest.items()}
            newest |= {value.tag.removesuffix(_TEXT): event.step for value in event.summary.value}
        newest.pop('config', None)
        # Without earlier files here, there may be some of another machine, with the steps that are written again now.
        self.rewind(step if newest else -1)
        self.show(0, 'config', json.dumps(self._config, indent=1, default=str))
        return {key: min(known, step) for key, known in newest.items()}

    def rewind(self, step: int) -> bool:
        start = self._event_types.SessionLog(status=self._event_types.SessionLog.START)
        self._write(step + 1, session_log=start)
        return True

    def log(self, lines: Sequence[Line]) -> None:
        types = self._summary_types.Summary
        for step, numbers, when in lines:
            values = [types.Value(tag=key, simple_value=value) for key, value in numbers.items()]
            self._write(step, when, summary=types(value=values))
        self._writer.flush()

    def show(self, step: int, key: str, content: Shown) -> None:
        if isinstance(content, pathlib.Path):
            types, picture = self._summary_types.Summary, content.read_bytes()
            width, height = struct.unpack('>II', picture[16:24])  # of the PNG's first chunk
            image = types.Image(height=height, width=width, colorspace=4, encoded_image_string=picture)
            summary = types(value=[types.Value(tag=key, image=image)])
        else:
            text = markdown_table(content) if isinstance(content, Table) else markdown_code(content)
            summary = self._summary.text(key, text)
        self._write(step, summary=summary)
        self._writer.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self, succeeded: bool) -> None:
        del succeeded
        self._writer.close()

    def _write(self, step: int, when: float | None = None, **content: Any) -> None:
        if self._size > LARGEST:
            self._writer.close()
            self._writer, self._size = self._open(), 0
        event = self._event_types.Event(wall_time=when or time.time(), step=step, **content)
        self._writer.write_event(event)
        self._size += event.ByteSize() + 16  # with its length and checksums

    def _events(self) -> Iterator[Any]:
        """The complete events of the earlier files: TFRecord, that is length, checksum, event, checksum."""
        for path in self._earlier:
            content, at = path.read_bytes(), 0
            while at + 12 <= len(content):
                (length,) = struct.unpack_from('<Q', content, at)
                if at + 12 + length + 4 > len(content):
                    break
                yield self._event_types.Event.FromString(content[at + 12 : at + 12 + length])
                at += 12 + length + 4
