"""Reads two pickled files without unpickling them: the index of a Modalities .pbin, and the meta.pkl of nanoGPT.

A pickle is a program, and loading one can run arbitrary code. These parsers accept only the opcodes of a list of
(offset, length), in the only valid order, or of dicts of strings and integers. Anything else raises UserError. They
look up no names, call nothing, and use memory only for the content.
"""

import io
import pickletools
from array import array
from typing import Any, BinaryIO

import numpy as np

from pretrax.errors import UserError

_PROTO, _FRAME, _STOP = 0x80, 0x95, ord('.')
_EMPTY_LIST, _MARK, _APPEND, _APPENDS, _TUPLE2 = b'](ae\x86'
_INTEGER_BYTES = {ord('K'): 1, ord('M'): 2, ord('J'): 4}
_LONG1 = 0x8A
_BLOCK, _LONGEST_OPCODE = 1 << 20, 16  # bytes
_REMEMBER = {0x94: 1, ord('q'): 2, ord('r'): 5}  # opcodes that memoize a value; such a list never uses the memo


def read_pairs(stream: BinaryIO, name: str, most: int) -> np.ndarray:
    """The pairs, int64 [n, 2]. The memory used depends on the pairs, not on the size of the file.

    Args:
        stream: a pickle of protocol 2 to 5, with nothing after it.
        most: pairs.

    Raises:
        UserError: the pickle is not a list of at most this many pairs of integers >= 0.
    """
    numbers = array('q')
    began = stream.tell()
    size = stream.seek(0, io.SEEK_END) - began
    stream.seek(began)
    pickled = stream.read(_BLOCK)
    before = 0  # bytes of the stream before `pickled`
    at, n_pairs, n_whole = 2, 0, 0  # pairs so far, and pairs already in the list
    listed = marked = False
    if pickled[:1] != b'\x80' or pickled[1:2] not in (b'\x02', b'\x03', b'\x04', b'\x05'):
        raise _refusal(name, pickled, before, 0, 'it does not start like a pickle of protocol 2 to 5')
    try:
        while True:
            if len(pickled) - at < _LONGEST_OPCODE and (more := stream.read(_BLOCK)):
                pickled, before, at = pickled[at:] + more, before + at, 0
            op = pickled[at]
            if op in _INTEGER_BYTES and listed and len(numbers) - 2 * n_pairs < 2:
                after = at + 1 + _INTEGER_BYTES[op]
                numbers.append(_integer(pickled, at + 1, after, signed=op == ord('J')))
            elif op == _TUPLE2 and len(numbers) - 2 * n_pairs == 2 and (marked or n_pairs == n_whole):
                after = at + 1
                n_pairs += 1
            elif op in _REMEMBER:
                after = at + _REMEMBER[op]
            elif op == _LONG1 and listed and len(numbers) - 2 * n_pairs < 2 and pickled[at + 1] <= 8:
                after = at + 2 + pickled[at + 1]
                numbers.append(_integer(pickled, at + 2, after, signed=True))
            elif op == _FRAME:
                after = at + 9
                if int.from_bytes(pickled[at + 1 : after], 'little') > size - before - after:
                    raise IndexError
            elif op == _EMPTY_LIST and not listed:
                after, listed = at + 1, True
            elif op == _MARK and listed and not marked and len(numbers) == 2 * n_pairs == 2 * n_whole:
                after, marked = at + 1, True
            elif (op == _APPENDS and marked) or (op == _APPEND and not marked and n_pairs == n_whole + 1):
                if len(numbers) != 2 * n_pairs:
                    raise _refusal(name, pickled, before, at, 'a pair is incomplete')
                after, marked, n_whole = at + 1, False, n_pairs
            elif op == _STOP and listed and not marked and len(numbers) == 2 * n_whole:
                if before + at + 1 != size:
                    raise _refusal(name, pickled, before, at, f'{size - before - at - 1:,} bytes follow it')
                return np.frombuffer(numbers, np.int64).reshape(-1, 2)
            else:
                raise _refusal(name, pickled, before, at, 'it has other content')
            if n_pairs > most:
                raise UserError(f'{name}: the index has more than {most:,} documents\n  the file is damaged')
            at = after
    except IndexError:
        raise _refusal(name, pickled, before, len(pickled), 'it is truncated') from None
    except UserError:
        raise
    except ValueError as error:
        raise _refusal(name, pickled, before, at, str(error)) from None


def read_dict(pickled: bytes, name: str) -> dict[Any, Any]:
    """The pickled dict: keys are strings or integers, values also dicts of these.

    Args:
        pickled: a pickle of protocol 2 to 5.

    Raises:
        UserError: the pickle has anything else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    at = 0
    try:
        for opcode, argument, where in pickletools.genops(pickled):
            at = where or 0
            match opcode.name:
                case 'PROTO' | 'FRAME':
                    pass
                case 'BININT' | 'BININT1' | 'BININT2' | 'BINUNICODE' | 'SHORT_BINUNICODE':
                    stack.append(argument)
                case 'EMPTY_DICT':
                    stack.append({})
                case 'MEMOIZE':
                    memo[len(memo)] = stack[-1]
                case 'BINPUT' | 'LONG_BINPUT':
                    memo[argument] = stack[-1]
                case 'BINGET' | 'LONG_BINGET':
                    stack.append(memo[argument])
                case 'MARK':
                    marks.append(len(stack))
                case 'SETITEM' | 'SETITEMS':
                    mark = len(stack) - 2 if opcode.name == 'SETITEM' else marks.pop()
                    items, stack[mark:] = stack[mark:], []
                    for key, value in zip(items[::2], items[1::2], strict=True):
                        stack[-1][key] = value
                case 'STOP':
                    [found] = stack
                    if not isinstance(found, dict):
                        raise ValueError('it is not a dict')
                    return found
                case _:
                    raise ValueError('it has other content')
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(
            f'{name}: not a pickled dict of strings and integers: {error}, at byte {at:,}\n'
            '  no code of it was run: pretrax never loads a pickle'
        ) from None
    raise AssertionError('genops ends with STOP')


def _integer(pickled: bytes, start: int, stop: int, signed: bool) -> int:
    if stop > len(pickled):
        raise IndexError
    value = int.from_bytes(pickled[start:stop], 'little', signed=signed)
    if value < 0:
        raise ValueError(f'it has the number {value}')
    return value


def _refusal(name: str, pickled: bytes, before: int, at: int, reason: str) -> UserError:
    names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    opcode = f' (opcode {names[pickled[at]]})' if at < len(pickled) and pickled[at] in names else ''
    return UserError(
        f'{name}: the index is not a pickled list of (offset, length): {reason}, at byte {before + at:,}{opcode}\n'
        '  no code of it was run: pretrax parses lists, pairs and integers, and never loads a pickle'
    )
