"""What the pages of pretrax share: colors and controls, templates and scripts."""

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

KIT = files(__name__)
_IMPORT = re.compile(r"^import \{[^}]*\} from '\./(\w+\.js)';\n", re.MULTILINE)


def script_text(script: Traversable) -> str:
    """A module and the modules of the kit that it imports, as one module for a page in one file."""
    texts: dict[str, str] = {}

    def add(name: str, file: Traversable) -> None:
        if name not in texts:
            text = file.read_text(encoding='utf-8')
            for other in _IMPORT.findall(text):
                add(other, KIT / other)
            texts[name] = re.sub('^export ', '', _IMPORT.sub('', text), flags=re.MULTILINE)

    add('', script)
    return '\n'.join(texts.values())
