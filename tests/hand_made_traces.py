"""Traces of a GPU and of a TPU, written by hand after the layout that XLA's profiler documents (xplane.proto).

No accelerator was at hand: planes, lines and statistics are named as in traces that XLA's own converters read
(`/device:GPU:0` with a line per stream, `/device:TPU:0` with 'XLA Modules', 'XLA Ops' and 'Async XLA Ops').
"""

from jax.profiler import ProfileData


class Plane:
    """One plane of a trace, in protobuf's text form."""

    def __init__(self, name):
        self.name, self.lines, self.names, self.statistics = name, [], [], []

    def line(self, name, *events):
        """Adds a line of events: (name, start and end in ns), and its statistics as a fourth value."""
        written = [self._event(*event) for event in events]
        self.lines.append(f'lines {{ id: {len(self.lines) + 1} name: "{name}" timestamp_ns: 0 {" ".join(written)} }}')
        return self

    def _event(self, name, start, end, statistics=None):
        values = [
            f'stats {{ metadata_id: {self._number(self.statistics, key)} str_value: "{value}" }}'
            for key, value in (statistics or {}).items()
        ]
        return (
            f'events {{ metadata_id: {self._number(self.names, name)} offset_ps: {1000 * start} '
            f'duration_ps: {1000 * (end - start)} {" ".join(values)} }}'
        )

    @staticmethod
    def _number(known, name):
        if name not in known:
            known.append(name)
        return known.index(name) + 1

    def __str__(self):
        described = [
            f'{kind} {{ key: {number} value {{ id: {number} name: "{name}" }} }}'
            for kind, names in (('event_metadata', self.names), ('stat_metadata', self.statistics))
            for number, name in enumerate(names, 1)
        ]
        return f'planes {{ name: "{self.name}" {" ".join(self.lines + described)} }}'


def write(path, *planes):
    """Writes the planes as an `.xplane.pb`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace('\n'.join(map(str, planes))))
    return path
