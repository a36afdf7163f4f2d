"""The section `distill:` of a run: a student that learns from a teacher, and the outputs of the teacher.

A teacher is read piece by piece, as `init_from:` reads weights, in the compute dtype. Checkpoints of the student do not
have it: they have its fingerprint, which a resumed run compares.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pretrax.config.batch import rows_of
from pretrax.config.schema import Batch, Distill
from pretrax.data.batches.sequences import read_sequences
from pretrax.data.batches.source import HostBatch, Source
from pretrax.distill.files import TeacherFiles, read_description
from pretrax.distill.hidden_states import HiddenMatch
from pretrax.distill.student import Distillation, DistilledTransformer, Teacher, fingerprint
from pretrax.errors import Report, UserError
from pretrax.model.choices import TransformerOptions
from pretrax.model.request import ModelRequest
from pretrax.model.weights import abstract_weights
from pretrax.run.setup import Run
from pretrax.storage import locate
from pretrax.weights.origin import open_origin
from pretrax.weights.saved import stated_options
from pretrax.weights.warm_start import check_finite, check_tokenizer, placed_weights

KEY = 'distill.teacher'
_FIELDS = ('top_ids', 'top_log_probs', 'log_tail')  # fields of a batch, in the order of `HostTopK`


class Teaching:
    """The teacher of a run, or the directory that was prepared with one.

    Attributes:
        files: the directory `distill.cache`, once it is open; None: the teacher runs in every step.
        fingerprint: identifies the teacher, once the run has begun.
    """

    def __init__(self, section: Distill):
        self.section = section
        self.files: TeacherFiles | None = None
        self.fingerprint: str | None = None

    def build_model(self, name: str, options: Any, request: ModelRequest) -> DistilledTransformer:
        """The model of a run that has a teacher, from the description of the teacher. It reads no weights.

        Raises:
            UserError: one of them is not the decoder, their vocabularies differ, or the teacher does not fit the mesh.
        """
        section = self.section
        if not isinstance(options, TransformerOptions):
            raise UserError(
                f'distill: model.name = {name} cannot be distilled\nuse model.name=transformer, or leave out distill'
            )
        hidden = None if section.hidden is None else HiddenMatch(section.hidden.layers, section.hidden.weight)
        how = Distillation(section.weight, section.temperature, section.direction, section.chunks, hidden)
        if section.teacher is None:
            return DistilledTransformer(request, options=options, teacher=None, how=how)
        teacher = stated_options(section.teacher, KEY)
        ours, theirs = options.vocab_size or request.vocab_size, teacher.vocab_size
        if theirs is not None and theirs != ours:
            known = request.vocab_size if request.largest_token is None else request.largest_token + 1
            fix = (
                f'write model.vocab_size={theirs}, and use the tokenizer of the teacher: data.tokenizer=PATH'
                if theirs >= known
                else 'use the tokenizer of the teacher: data.tokenizer=PATH'
            )
            raise UserError(
                f'{KEY}: {section.teacher} has a vocabulary of {theirs:,} tokens, and the model one of {ours:,}\n'
                f'the probabilities of both have to be of the same tokens; {fix}'
            )
        request = dataclasses.replace(request, vocab_size=ours)
        return DistilledTransformer(request, options=options, teacher=teacher, how=how)

    def check_exists(self) -> None:
        """Raises UserError if there is no teacher, or no directory that was prepared with one."""
        if self.section.teacher is not None:
            stated_options(self.section.teacher, KEY)
        if self.section.cache is not None:
            read_description(locate(self.section.cache))

    def open_files(self, batch: Batch, vocab_size: int | None, source: Source) -> None:
        """Opens the directory `distill.cache`, if the run has one.

        Args:
            vocab_size: of its model; None: that of the data.

        Raises:
            UserError: it is missing or damaged, or was prepared for other data, another tokenizer or another
                temperature.
        """
        cache = self.section.cache
        if cache is None:
            return
        files = TeacherFiles(locate(cache), jax.process_index())
        prepared = files.description
        keys = [('batch.sequence_length', prepared.sequence_length, s.sequence_length) for s in batch.sizes.values()]
        for key, theirs, ours in (*keys, ('distill.temperature', prepared.temperature, self.section.temperature)):
            if theirs != ours:
                raise UserError(
                    f'distill.cache: {cache} was prepared with {key} = {theirs:g}, and the run has {ours:g}\n'
                    f'use {key}={theirs:g}, or prepare another directory'
                )
        facts = {
            'tokenizer': (prepared.tokenizer, source.tokenizer_sha256),
            'vocabulary': (prepared.vocab_size, vocab_size or source.vocab_size),
            'data': (prepared.tokens, source.fingerprint),
        }
        for what, (theirs, ours) in facts.items():
            if theirs != ours:
                raise UserError(
                    f'distill.cache: {cache} was prepared with another {what}: {theirs} there, {ours} in the run\n'
                    f'prepare it again: pretrax distill prepare CONFIG distill.teacher={prepared.place} '
                    '--out NEW_DIRECTORY'
                )
        self.files = files

    @property
    def fields(self) -> Mapping[str, tuple[str, ...]]:
        """The fields that batches get from the directory, and the names of their dimensions after [B, L]."""
        return {} if self.files is None else dict(zip(_FIELDS, (('top_k',), ('top_k',), ()), strict=True))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of these dimensions."""
        return {} if self.files is None else {'top_k': self.files.description.top_k}

    def read(self, rows: HostBatch) -> Mapping[str, np.ndarray]:
        """The values of these fields for some rows. Raises UserError if the directory lacks some of them."""
        return {} if self.files is None else dict(zip(_FIELDS, self.files.read(rows), strict=True))

    def begin(self, run: Run, report: Report) -> Teacher | None:
        """Loads the teacher, if it runs, and checks that a directory has the last batch, or a run would stop midway.

        Raises UserError if the directory lacks rows, or as `load`.
        """
        if self.files is not None:
            batch = run.sizes
            self.files.read(read_sequences(run.source, *rows_of(batch, run.steps - 1), slice(None)))
        teacher = self.load(run, report)
        self.fingerprint = fingerprint(teacher) if self.files is None else self.files.description.fingerprint
        return teacher

    def load(self, run: Run, report: Report) -> Teacher | None:
        """The weights of the teacher on the devices of a run; None: it does not run. The mesh of the run must be set.

        Raises UserError if there is no checkpoint, its weights do not fit its description, its tokenizer is not that of
        the data, or numbers of a Hugging Face checkpoint are not finite.
        """
        model, place = run.recipe.model, self.section.teacher
        if place is None or not isinstance(model, DistilledTransformer):
            return None
        origin = open_origin(place, key=KEY)
        check_tokenizer(origin, run.source.tokenizer, report)
        like = model.abstract_constants()
        assert model.teacher is not None
        assert like is not None
        weights = placed_weights(origin, abstract_weights(model.teacher.arch), like.weights, None, report)
        check_finite(origin, report)
        count = sum(leaf.size for leaf in jax.tree.leaves(like))
        here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(weights))
        report(f'{KEY}: {count:,} parameters of {place}, {here / 2**20:,.1f} MiB per device')
        return Teacher(weights)

    @property
    def description(self) -> dict[str, Any]:
        """What the description of a checkpoint has."""
        return {'teacher': self.fingerprint}

    def check_same(self, description: Mapping[str, Any], run_dir: Any) -> None:
        """Raises UserError if a checkpoint was trained with a teacher of another fingerprint."""
        if description.get('teacher') == self.fingerprint:
            return
        if self.section.cache is not None:
            raise UserError(
                f'{run_dir} was trained with another teacher than that of {self.section.cache}\n'
                'use its directory, another name=, or resume with the new teacher: --allow-changes'
            )
        raise UserError(
            f'{run_dir} was trained with another teacher: the weights of {self.section.teacher} have changed since\n'
            'name one checkpoint, such as runs/NAME/checkpoints/1000, that is kept; use another name=, or resume with '
            'the new teacher: --allow-changes'
        )
