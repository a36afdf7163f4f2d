"""Reads TensorBoard's event files, without TensorBoard."""

import collections
import math
import pathlib
import struct

OTHERS = ('_', 'config', 'validation', 'curves', 'report')  # what a tracker has besides numbers and samples

type Points = collections.Counter[tuple[int, str, float]]


def point(step: int, key: str, value: float) -> tuple[int, str, float]:
    """A point that equals another one if both are NaN, with the precision of TensorBoard, float32."""
    if math.isnan(value):
        return step, key, 'nan'
    return (
        step,
        key,
        struct.unpack('f', struct.pack('f', value))[0] if abs(value) < 1e38 else math.copysign(math.inf, value),
    )


def tensorboard_points(directory: pathlib.Path) -> tuple[Points, list[int]]:
    """What TensorBoard shows: a START event removes the points at its step and later of what came before it."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points, samples = [], []
    for file in sorted((directory / 'tb').iterdir()):
        content, at = file.read_bytes(), 0
        while at + 12 <= len(content):  # TFRecord: length, checksum, event, checksum
            (length,) = struct.unpack_from('<Q', content, at)
            if len(content) < at + 12 + length + 4:
                break  # left incomplete by a kill; TensorBoard goes on to the next file
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                points = [each for each in points if each[0] < event.step]
                samples = [step for step in samples if step < event.step]
            for value in event.summary.value:
                if value.tag.startswith('samples'):
                    samples.append(event.step)
                elif not value.tag.startswith(OTHERS):
                    points.append(point(event.step, value.tag, value.simple_value))
    return collections.Counter(points), samples
