"""What an all-reduce of a compiled program stands for: XLA may add up where a program gathers or scatters."""

from collections.abc import Mapping, Sequence

from pretrax.hlo.parse import Instruction
from pretrax.hlo.work import bodies

# Operations that keep all elements.
_SAME = ('bitcast', 'copy', 'copy-start', 'copy-done', 'convert', 'reshape', 'transpose', 'get-tuple-element')


def stands_for(
    start: Instruction, result: str, body: Sequence[Instruction], computations: Mapping[str, list[Instruction]]
) -> str:
    """'gather' if each device contributes only a slice, 'scatter' if each uses only a slice of the sum, otherwise ''.

    Args:
        start: the instruction that takes the operands.
        result: the name of the instruction with the sum.
        body: the computation of both.
        computations: all of the program.
    """
    here = {one.name: one for one in body}
    if all(_is_padded(operand, here, computations) for operand in start.operands):
        return 'gather'
    return 'scatter' if _is_sliced(result, body, computations) else ''


def _is_sliced(name: str, body: Sequence[Instruction], computations: Mapping[str, list[Instruction]]) -> bool:
    """Whether all users of a value read a slice of it that is chosen at run time."""
    users = [one for one in body if name in one.operands]
    for one in users:
        if one.operation == 'dynamic-slice' and one.operands[0] == name:
            continue
        if one.operation in _SAME and _is_sliced(one.name, body, computations):
            continue
        if one.operation != 'fusion':
            return False
        for called in bodies(one):
            inner = computations.get(called, [])
            numbers = [number for number, operand in enumerate(one.operands) if operand == name]
            parameters = [x.name for x in inner if x.operation == 'parameter' and int(x.rest.split(')')[0]) in numbers]
            if not all(_is_sliced(parameter, inner, computations) for parameter in parameters):
                return False
    return bool(users)


def _is_padded(name: str, here: Mapping[str, Instruction], computations: Mapping[str, list[Instruction]]) -> bool:
    """Whether a value is a slice of this device in an array that is otherwise one constant."""
    one = here.get(name)
    if one is None:
        return False
    if one.operation in _SAME:
        return _is_padded(one.operands[0], here, computations)
    if one.operation == 'dynamic-update-slice':
        return _is_constant(one.operands[0], here, computations)
    if one.operation == 'fusion' and (called := bodies(one)) and (inner := computations.get(called[0])):
        by_name = {x.name: x for x in inner}
        for operand, parameter in zip(one.operands, _parameters(inner), strict=False):
            if _is_constant(operand, here, computations):
                by_name[parameter] = here[operand]
        return _is_padded(inner[-1].name, by_name, computations)
    return False


def _is_constant(name: str, here: Mapping[str, Instruction], computations: Mapping[str, list[Instruction]]) -> bool:
    """Whether all elements of a value are one constant."""
    one = here.get(name)
    if one is None:
        return False
    if one.operation in _SAME:
        return _is_constant(one.operands[0], here, computations)
    if one.operation == 'fusion' and (called := bodies(one)) and (inner := computations.get(called[0])):
        return _is_constant(inner[-1].name, {x.name: x for x in inner}, computations)
    return one.operation in ('broadcast', 'constant')


def _parameters(body: list[Instruction]) -> list[str]:
    """The names of the parameters of a computation, by their number."""
    numbers = {int(one.rest.split(')')[0]): one.name for one in body if one.operation == 'parameter'}
    return [numbers[number] for number in sorted(numbers)]
