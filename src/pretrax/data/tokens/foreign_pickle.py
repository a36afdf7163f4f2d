"""A list of pairs of integers out of a pickle, without unpickling: the index of a Modalities .pbin file.

A pickle is a program, and loading one runs whatever it says. This reads the few opcodes that a list of (offset, length)
is made of, in the only order in which they make one, straight into an array. Anything else ends in a UserError: no name
is looked up, nothing is called, nothing nests, and the memory used is that of the numbers.
"""

import pickletools
from array import array

import numpy as np

from pretrax.errors import UserError

_PROTO, _FRAME, _STOP = 0x80, 0x95, ord('.')
_EMPTY_LIST, _MARK, _APPEND, _APPENDS, _TUPLE2 = b'](ae\x86'
_INTEGER_BYTES = {ord('K'): 1, ord('M'): 2, ord('J'): 4}
_LONG1 = 0x8A
_REMEMBER = {0x94: 1, ord('q'): 2, ord('r'): 5}  # for later reference, which such a list never makes


def read_pairs(pickled: bytes, name: str) -> np.ndarray:
    """The pairs as int64 [n, 2]. Raises UserError for any pickle that is not a list of pairs of integers from 0 on.

    Args:
        pickled: protocol 2 to 5, and nothing after it.
        name: what messages call it.
    """
    numbers = array('q')
    at, n_pairs, n_whole = 2, 0, 0  # pairs so far; those that were put into the list
    listed = marked = False
    if pickled[:1] != b'\x80' or pickled[1:2] not in (b'\x02', b'\x03', b'\x04', b'\x05'):
        raise _refusal(name, pickled, 0, 'it does not begin like a pickle of protocol 2 to 5')
    try:
        while True:
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
                if int.from_bytes(pickled[at + 1 : after], 'little') > len(pickled) - after:
                    raise IndexError
            elif op == _EMPTY_LIST and not listed:
                after, listed = at + 1, True
            elif op == _MARK and listed and not marked and len(numbers) == 2 * n_pairs == 2 * n_whole:
                after, marked = at + 1, True
            elif (op == _APPENDS and marked) or (op == _APPEND and not marked and n_pairs == n_whole + 1):
                if len(numbers) != 2 * n_pairs:
                    raise _refusal(name, pickled, at, 'a pair is not whole')
                after, marked, n_whole = at + 1, False, n_pairs
            elif op == _STOP and listed and not marked and len(numbers) == 2 * n_whole:
                if at + 1 != len(pickled):
                    raise _refusal(name, pickled, at, f'{len(pickled) - at - 1:,} bytes follow it')
                return np.frombuffer(numbers, np.int64).reshape(-1, 2)
            else:
                raise _refusal(name, pickled, at, 'it holds something else')
            at = after
    except IndexError:
        raise _refusal(name, pickled, len(pickled), 'it is cut short') from None
    except ValueError as error:
        raise _refusal(name, pickled, at, str(error)) from None


def _integer(pickled: bytes, start: int, stop: int, signed: bool) -> int:
    if stop > len(pickled):
        raise IndexError
    value = int.from_bytes(pickled[start:stop], 'little', signed=signed)
    if value < 0:
        raise ValueError(f'it holds the number {value}')
    return value


def _refusal(name: str, pickled: bytes, at: int, reason: str) -> UserError:
    names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    opcode = f' (opcode {names[pickled[at]]})' if at < len(pickled) and pickled[at] in names else ''
    return UserError(
        f'{name}: the index is no pickled list of (offset, length): {reason}, at byte {at:,} of it{opcode}\n'
        '  nothing of it was run: pretrax reads lists, pairs and integers out of a pickle, and never loads one'
    )
