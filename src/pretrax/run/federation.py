"""A run as an island of a federation: it joins before anything is compiled, and takes part in rounds between steps."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xxhash

from pretrax.amounts import size
from pretrax.checkpoint.agreement import from_process_0
from pretrax.checkpoint.manifest import named_leaves
from pretrax.config import resolved_yaml
from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import check_row_order
from pretrax.errors import Report
from pretrax.federation.course import Course
from pretrax.federation.encoding import encoded_size
from pretrax.federation.fragments import fragments
from pretrax.federation.island import Island
from pretrax.federation.link import Author
from pretrax.federation.objects import config_path
from pretrax.federation.registry import Membership, join
from pretrax.federation.replay import read_course, rounds_of
from pretrax.model.weights import layers_with
from pretrax.run.same_run import federation_terms
from pretrax.run.setup import Run
from pretrax.storage.shared_path import shared
from pretrax.train.groups import settings_of


@contextlib.contextmanager
def joined(run: Run, report: Report) -> Iterator[tuple[Run, Island]]:
    """The run with its share of the data, and its island. It names a bucket in `federation`.

    Raises:
        UserError: the run does not fit the federation, cannot be an island, or the bucket cannot be reached.
    """
    section = run.federation
    assert section.bucket is not None
    place = shared(section.bucket)
    terms = federation_terms(run)
    settings = settings_of(run.recipe, run.like.weights)
    moving = jax.tree.map(lambda weight, one: weight if np.any(one.moves) else None, run.like.weights, settings)
    shapes = {name: leaf.shape for name, leaf in named_leaves(moving)}
    parts = fragments(shapes, section.fragments, _layers(run, shapes))
    with contextlib.ExitStack() as stack:
        members: list[Membership] = []  # in process 0

        def enter() -> list[Any]:
            member = stack.enter_context(join(place, section.name or run.name, terms, run.faults.lease_seconds, report))
            content = resolved_yaml(run.config).encode()
            digest = xxhash.xxh3_128_hexdigest(content)
            for path in (config_path(place, member.name), config_path(place, member.name, digest)):
                path.write_bytes(content)
            members.append(member)
            course = read_course(place, member.name)
            facts = [member.share, member.name, member.attempt, member.is_founder, digest]
            return [*facts, course and course.model_dump(mode='json')]

        share, *facts, course = from_process_0('federation', enter)
        course = course and Course.model_validate(course)
        author = Author(*facts, lease=None, rounds=None)
        for member in members:
            author = author._replace(lease=member.lease, rounds=rounds_of(member, section, report, course))
        count = sum(map(math.prod, shapes.values()))
        sent = size(encoded_size(-(-count // section.fragments), section.encoding))
        report(
            f'federation: island {author.name} has share {share} of {section.islands} in {place}; every '
            f'{section.rounds_apart} steps it sends {sent} ({section.encoding})'
        )
        if run.init_from and not author.is_founder:
            report('federation: the first weights are those of the island that has made it, not those of init_from')
        island = Island(
            place, section, author, parts, run.steps, weights=run.like.weights, report=report, course=course
        )
        run = run.with_share(share)
        check_row_order(
            run.source, run.components['data'].name, (rows_of(run.sizes, step)[:2] for step in run.sizes.sizes)
        )
        yield run, island


def _layers(run: Run, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """The layers that the rows of stacked weights belong to."""
    arch = run.recipe.model.arch
    stacked = [name for name in shapes if name.startswith('layers.') and shapes[name]]
    return {
        name: list(range(shapes[name][0])) if arch is None else list(layers_with(arch, name.removeprefix('layers.')))
        for name in stacked
    }
