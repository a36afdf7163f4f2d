"""The teacher of distillation: its weights from a checkpoint, on the mesh of the run.

A teacher is read piece by piece, as `init_from:` reads weights, in the compute dtype. Checkpoints of the student do not have it:
they have its fingerprint, which a resumed run compares.
"""

from typing import Any

import jax

from pretrax.config import RunConfig
from pretrax.errors import Report, UserError
from pretrax.model.distillation import DistilledTransformer
from pretrax.model.weights import Teacher, abstract_weights
from pretrax.run.origin import open_origin
from pretrax.run.setup import Run
from pretrax.run.warm_start import check_finite, check_tokenizer, placed_weights

KEY = 'distill.teacher'


def load_teacher(run: Run, report: Report) -> Teacher | None:
    """The weights of the teacher on the devices of a run; None: the run has none. The mesh of the run must be set.

    Raises:
        UserError: there is no checkpoint, its weights do not fit its description, its tokenizer is not that of the data, or
            numbers of a Hugging Face checkpoint are not finite.
    """
    model, section = run.recipe.model, run.config.distill
    if section is None or section.teacher is None or not isinstance(model, DistilledTransformer):
        return None
    origin = open_origin(section.teacher, key=KEY)
    check_tokenizer(origin, run.source.tokenizer, report)
    like = model.abstract_teacher()
    assert model.teacher is not None
    assert like is not None
    weights = placed_weights(origin, abstract_weights(model.teacher.arch), like.weights, None, report)
    check_finite(origin, report)
    count = sum(leaf.size for leaf in jax.tree.leaves(like))
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(weights))
    report(f'{KEY}: {count:,} parameters of {section.teacher}, {here / 2**20:,.1f} MiB per device')
    return Teacher(weights)


def check_same_teacher(
    config: RunConfig, description: dict[str, Any], teacher: str | None, allow_changes: bool
) -> None:
    """Raises UserError if a checkpoint was trained with a teacher of another fingerprint."""
    if description.get('teacher') != teacher and not allow_changes:
        if config.distill is not None and config.distill.cache is not None:
            raise UserError(
                f'{config.run_dir} was trained with another teacher than that of {config.distill.cache}\n'
                'use its directory, another name=, or resume with the new teacher: --allow-changes'
            )
        where = config.distill.teacher if config.distill else 'the run'
        raise UserError(
            f'{config.run_dir} was trained with another teacher: the weights of {where} have changed since\n'
            'name one checkpoint, such as runs/NAME/checkpoints/1000, that is kept; use another name=, or resume with the '
            'new teacher: --allow-changes'
        )
