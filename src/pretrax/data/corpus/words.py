"""Splits text into words, for comparisons between texts. In scripts without spaces, each character is a word."""

import re

# Scripts that are written without spaces between words: ranges of code points with their marks, as in Scripts.txt of
# the Unicode Character Database. Hangul and Tibetan separate words or syllables.
_UNSPACED = ''.join(
    f'{chr(first)}-{chr(last)}'
    for first, last in (
        (0x0E01, 0x0E3A), (0x0E40, 0x0E4E), (0x0E81, 0x0ECE), (0x0EDC, 0x0EDF),  # Thai, Lao
        (0x1000, 0x103F), (0x1050, 0x108F), (0xA9E0, 0xA9EF), (0xAA60, 0xAA7F),  # Myanmar
        # Khmer, Tai Le, New Tai Lue, Tai Tham, Tai Viet
        (0x1780, 0x17D3), (0x1950, 0x19CF), (0x1A20, 0x1A7C), (0xAA80, 0xAADD),
        (0x1B00, 0x1B4C), (0xA980, 0xA9C0),  # Balinese, Javanese
        (0x2E80, 0x2FD5), (0x3005, 0x3007), (0x3021, 0x3029), (0x3031, 0x303C), (0x3041, 0x309F), (0x30A1, 0x30FA),
        (0x30FC, 0x30FF), (0x3105, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
        (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x1AFF0, 0x1B16F), (0x20000, 0x3FFFF),  # Han, Hiragana, Katakana, Bopomofo
    )
)  # fmt: skip
_WORD = re.compile(rf'[{_UNSPACED}]|[^\W{_UNSPACED}]+')
_ASCII_WORD = re.compile(r'\w+')  # finds the same words in ASCII, faster


def split_words(text: str) -> list[str]:
    """The runs of letters, digits and underscores of a text; each character of a script without spaces is one."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text)
