"""Builds the model of a run with `distill:`, from the description of its teacher. It reads no weights."""

import dataclasses
from typing import Any

import jax
from pydantic import ValidationError

from pretrax.checkpoint import find_checkpoint, read_description, read_manifest
from pretrax.config import RunConfig, build
from pretrax.data.batches.source import Source
from pretrax.data.batches.teacher_files import TeacherFiles
from pretrax.errors import UserError
from pretrax.huggingface.section import HF, model_section
from pretrax.model.base import Model, check_model
from pretrax.model.distillation import Distillation, DistilledTransformer
from pretrax.model.hidden_states import HiddenMatch
from pretrax.model.options import TransformerOptions
from pretrax.model.request import ModelRequest
from pretrax.model.weights import Teacher
from pretrax.storage import locate
from pretrax.train.fingerprint import fingerprint

KEY = 'distill.teacher'


def build_model(config: RunConfig, request: ModelRequest) -> Model:
    """The model of a configuration: with `distill`, one that has a teacher.

    Raises:
        UserError: the model or its teacher does not support a setting of the configuration, or lacks tokens of the data.
    """
    if config.distill is not None:
        model = build_distilled(config, request)
    else:
        model = check_model(build('model', config.model, request), config.model.name)
    largest = request.vocab_size - 1 if request.largest_token is None else request.largest_token
    if model.vocab_size is not None and model.vocab_size <= largest:
        raise UserError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {request.vocab_size}, and the data can have "
            f'token {largest}\nleave it out, or use model.vocab_size={request.vocab_size}'
        )
    return model


def build_distilled(config: RunConfig, request: ModelRequest) -> DistilledTransformer:
    """The model of a run that has a teacher.

    Raises:
        UserError: one of them is not the decoder, their vocabularies differ, or the teacher does not fit the mesh.
    """
    section, options = config.distill, config.model.options
    assert section is not None
    if not isinstance(options, TransformerOptions):
        raise UserError(
            f'distill: model.name = {config.model.name} cannot be distilled\nuse model.name=transformer, or leave out distill'
        )
    hidden = None if section.hidden is None else HiddenMatch(section.hidden.layers, section.hidden.weight)
    how = Distillation(section.weight, section.temperature, section.direction, section.chunks, hidden)
    if section.teacher is None:
        return DistilledTransformer(request, options=options, teacher=None, how=how)
    teacher, theirs = teacher_options(section.teacher)
    ours = options.vocab_size or request.vocab_size
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


def teacher_options(place: str) -> tuple[TransformerOptions, int | None]:
    """The options of a teacher, from its checkpoint, and the tokens of its vocabulary if they are known.

    Raises:
        UserError: there is no checkpoint, or its model is not the decoder.
    """
    section: dict[str, Any] = model_section(place, KEY)
    name = section.pop('name', 'transformer')
    if name != 'transformer':
        raise UserError(
            f'{KEY}: {place} is a model of the kind {name}\na teacher has to be a decoder: model.name=transformer'
        )
    if not place.startswith(HF):
        directory, step = find_checkpoint(locate(place))
        described = read_description(directory, step).get('vocab_size')
        positions = read_manifest(directory, step).arrays.get('weights.positions')
        section |= {'vocab_size': described} if described else {}
        section |= {'max_sequence_length': positions.shape[0]} if positions else {}
    try:
        options = TransformerOptions(**section)
    except ValidationError as error:
        said = ' '.join(str(error).split())[:300]
        raise UserError(f'{KEY}: this version of pretrax does not know the model of {place}\n{said}') from error
    return options, options.vocab_size


def open_teacher_files(config: RunConfig, source: Source) -> TeacherFiles | None:
    """The directory `distill.cache` of a run; None: the run has none.

    Raises:
        UserError: it is missing or damaged, or was prepared for other data, another tokenizer or another temperature.
    """
    section = config.distill
    if section is None or section.cache is None:
        return None
    files = TeacherFiles(locate(section.cache), jax.process_index())
    known = files.description
    for size in config.batch.sizes.values():
        _check_same(section.cache, 'batch.sequence_length', known.sequence_length, size.sequence_length)
    _check_same(section.cache, 'distill.temperature', known.temperature, section.temperature)
    vocab_size = getattr(config.model.options, 'vocab_size', None) or source.vocab_size
    again = f'prepare it again: pretrax distill prepare CONFIG distill.teacher={known.place} --out NEW_DIRECTORY'
    facts = {
        'tokenizer': (known.tokenizer, source.tokenizer_sha256),
        'vocabulary': (known.vocab_size, vocab_size),
        'data': (known.tokens, source.fingerprint),
    }
    for what, (theirs, ours) in facts.items():
        if theirs != ours:
            raise UserError(
                f'distill.cache: {section.cache} was prepared with another {what}: {theirs} there, {ours} in the run\n{again}'
            )
    return files


def teacher_fingerprint(files: TeacherFiles | None, teacher: Teacher | None) -> str | None:
    """Identifies the teacher of a run, or what was prepared with one; None: the run has neither."""
    return fingerprint(teacher) if files is None else files.description.fingerprint


def _check_same(cache: str, key: str, theirs: float, ours: float) -> None:
    if theirs != ours:
        raise UserError(
            f'distill.cache: {cache} was prepared with {key} = {theirs:g}, and the run has {ours:g}\n'
            f'use {key}={theirs:g}, or prepare another directory'
        )
