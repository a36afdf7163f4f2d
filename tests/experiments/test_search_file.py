"""The file of a search: what is refused, and with which words."""

import json

import pytest

from launched import BASE
from pretrax.errors import UserError
from pretrax.experiments.search_file import read_search


def read(place, **values):
    (place / 'base.yaml').write_text(json.dumps(BASE))
    search = {'base': 'base.yaml', 'parameters': {'optimizer.learning_rate': {'low': 0.01, 'high': 0.1}}} | values
    (place / 'search.yaml').write_text(json.dumps(search))
    return read_search(place / 'search.yaml')


def test_a_trial_has_the_values_of_the_base_the_changes_and_its_own(tmp_path):
    space = read(tmp_path, change={'steps': 4, 'eval': {'every': 2}})
    config = space.config({'optimizer.learning_rate': 0.05}, name='n', run_dir=str(tmp_path / 'r'))
    assert (config.steps, config.eval.every, config.seed) == (4, 2, BASE['seed'])
    assert config.optimizer.learning_rate == 0.05
    assert str(config.run_dir) == str(tmp_path / 'r')
    grid = read(tmp_path, sampler='grid', parameters={'seed': {'low': 1, 'high': 3}, 'steps': [1, 2]}).search
    assert (grid.grid, grid.number_of_trials) == ({'seed': [1, 2, 3], 'steps': [1, 2]}, 6)


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ({'parameters': {'optimizer.lr': [0.1, 0.2]}}, 'optimizer.lr is not a key that exists'),
        ({'parameters': {'optimizer.learning_rate': {'low': 1, 'high': 0.1}}}, 'expected low < high'),
        ({'parameters': {'optimizer.learning_rate': {'low': 0, 'high': 0.1, 'log': True}}}, 'needs low > 0'),
        ({'parameters': {'seed': [1, 1]}}, 'needs two or more different values'),
        ({'parameters': {'name': ['a', 'b']}}, 'is set by the search'),
        (
            {'parameters': {'model.attention.n_heads': [1, 'two']}},
            r'search.yaml:1: model.attention.n_heads=two is not valid',
        ),
        ({'sampler': 'grid'}, 'a grid needs a list, or a step'),
        ({'sampler': 'cmaes', 'parameters': {'seed': [1, 2]}}, 'CMA-ES needs ranges'),
        ({'sampler': 'bayes'}, "is 'bayes'; expected 'tpe', 'cmaes', 'random' or 'grid'"),
        ({'change': {'eval': {'every': 0}}}, 'eval.every is 0, so there is no val_loss'),
        ({'launch': ['slrum']}, "'slrum' is not an engine"),
        ({'base': 'nothing.yaml'}, 'nothing.yaml does not exist'),
    ],
)
def test_a_mistake_is_refused_before_the_first_trial(tmp_path, values, words):
    with pytest.raises(UserError, match=words) as error:
        read(tmp_path, **values)
    assert len(str(error.value).splitlines()) <= 10
