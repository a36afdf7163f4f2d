"""The process that checks devices may hang."""

import time

from pretrax.doctor import diagnosis
from pretrax.doctor.findings import Context, Finding


def test_a_check_that_hangs_is_a_failure_and_the_others_run(monkeypatch):
    def run_directory(context):
        time.sleep(100)
        yield Finding('never', '')

    def cores(context):
        yield Finding('cores', '2')

    monkeypatch.setattr(diagnosis, 'MACHINE', (run_directory, cores))
    found = diagnosis.check_machine(Context(None, seconds=4.0))
    assert [(one.check, one.status) for one in found] == [('run directory', 'failure'), ('cores', 'ok')]
