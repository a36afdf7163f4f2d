"""What the server of `pretrax watch` tells Prometheus, read with its own parser."""

import json
import math

from prometheus_client.parser import text_string_to_metric_families

from pretrax.view.live.prometheus import Gauges
from pretrax.view.live.run import WatchedRun


def samples(text):
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


def test_the_newest_numbers_of_a_run_are_gauges_and_its_time_has_causes(tmp_path):
    line = {'step': 3, 'loss': 2.5, 'grad_norm': None, 'nonfinite': {'grad_norm': 'nan'}, 'goodput': 0.7}
    line |= {'seconds/kept': 7.0, 'seconds/lost': 3.0, 'time': 1.8e9}
    (tmp_path / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
    run = WatchedRun(tmp_path, 'a "run"')
    run.poll()
    found = samples(Gauges(lambda: [run]).text().decode())
    assert math.isnan(found.pop(('pretrax_run', 'a "run"', 'grad_norm')))
    assert found == {
        ('pretrax_run', 'a "run"', 'loss'): 2.5,
        ('pretrax_run', 'a "run"', 'goodput'): 0.7,
        ('pretrax_run_seconds', 'a "run"', 'kept'): 7.0,
        ('pretrax_run_seconds', 'a "run"', 'lost'): 3.0,
    }
