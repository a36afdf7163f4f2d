"""Mistakes in the section `federation` are named with their fix, before an island joins anything."""

import pytest

from config.smallest import VALUES as SMALLEST
from pretrax.config import from_values
from pretrax.errors import UserError


def federated(*overrides: str, **section):
    return from_values(SMALLEST | {'federation': {'bucket': 'gs://shared/model'} | section}, overrides)


def test_a_run_trains_alone_unless_it_names_a_bucket():
    assert from_values(SMALLEST).federation.bucket is None
    assert str(federated().federation.bucket) == 'gs://shared/model'


@pytest.mark.parametrize(('section', 'kept'), [({}, 0.0), ({'delay': 3}, 0.5), ({'delay': 3, 'mixing': 0.0}, 0.0)])
def test_only_an_island_that_trained_meanwhile_keeps_some_of_its_own_weights(section, kept):
    assert federated(**section).federation.kept_share == kept


@pytest.mark.parametrize(
    ('section', 'problem', 'fix'),
    [
        ({'fragments': 3}, 'federation.fragments is 3, which does not divide', 'federation.every=102'),
        (
            {'every': 12, 'fragments': 4, 'delay': 3},
            'federation.delay is 3, but the next round begins 3 steps',
            'delay',
        ),
        ({'mixing': 0.5}, 'federation.mixing is 0.5, but without federation.delay', 'leave it out'),
        ({'mixing': 1.0, 'delay': 1}, 'federation.mixing is 1.0', 'less than 1'),
        ({'name': 'north/1'}, "federation.name is 'north/1'", 'write north-1'),
        ({'name': ''}, "federation.name is ''", 'write my-island'),
        ({'bucket': 'runs/test'}, 'federation.bucket is runs/test, inside run_dir', 'which all islands reach'),
        ({'bucket': './runs/test/shared/'}, 'inside run_dir', 'which all islands reach'),
        ({'bucket': '~/shared'}, 'only a shell expands ~', 'HOME'),
        ({'bucket': 'ftp://shared'}, 'ftp:// is not supported here', 'gs://, s3://'),
        ({'bucket': 7}, 'federation.bucket is 7; expected a directory', 'leave it out for a run without'),
        ({'encoding': 'fp8'}, "federation.encoding is 'fp8'; expected 'f32', 'bf16', 'int8' or 'int4'", 'encoding'),
        ({'outer_momentum': 1.0}, 'federation.outer_momentum is 1.0', 'less than 1'),
        ({'island': 'north'}, 'federation.island', 'did you mean islands?'),
    ],
)
def test_a_mistake_is_named_with_its_fix(section, problem, fix):
    with pytest.raises(UserError) as error:
        federated('name=test', **section)
    assert problem in str(error.value)
    assert fix in str(error.value)
    assert str(error.value).count('\n') < 10


def test_a_run_directory_may_lie_in_the_bucket_but_not_around_it():
    federated('run_dir=gs://shared/model-runs/a')
    federated('run_dir=gs://shared/model/runs/a')
    with pytest.raises(UserError, match='gs://shared/model, inside run_dir'):
        federated('run_dir=gs://shared')


def test_a_section_without_a_bucket_is_noted():
    assert from_values(SMALLEST).notes == ()
    assert from_values(SMALLEST, ['federation.islands=2']).notes == (
        'federation has no bucket, so this run trains alone',
    )


@pytest.mark.parametrize(
    'override', ['optimizer={name: schedule_free, learning_rate: 0.1}', 'init_from={path: runs/a, step: true}']
)
def test_keys_that_no_island_can_follow_are_refused(override):
    alone = from_values(SMALLEST | {'schedule': {'name': 'constant'}}, [override])
    assert alone.federation.bucket is None
    with pytest.raises(UserError, match=r'federation\.bucket=null'):
        federated('schedule.name=constant', override)
