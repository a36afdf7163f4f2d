"""README.md as a package index shows it; a hook of the build, named in pyproject.toml.

An index has only this one file. With a `Repository` in `[project.urls]`, links and pictures lead there, to the tag of
the version. Without one, a link is its text, and pictures are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# ![text](file) or [text](file), whose file is in the repository.
_LINK = re.compile(r'(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<file>(?!\w+:|#)[^)\s]+)\)')


class PackageReadme(MetadataHookInterface):
    """Sets `readme`, which is dynamic in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        source = (root / 'src' / 'pretrax' / '__init__.py').read_text()
        version = re.findall(r"^__version__ = '([^']+)'$", source, re.MULTILINE)[0]
        repository = metadata.get('urls', {}).get('Repository')
        text = readme_for_index((root / 'README.md').read_text(), repository, version)
        metadata['readme'] = {'content-type': 'text/markdown', 'text': text}


def readme_for_index(text: str, repository: str | None, version: str) -> str:
    """The text without relative links. `repository` is the URL of the repository, None if it has none."""

    def replace(link: re.Match[str]) -> str:
        if repository is None:
            return '' if link['picture'] else link['text']
        kind = 'raw' if link['picture'] else 'blob'
        return f'{link["picture"]}[{link["text"]}]({repository.rstrip("/")}/{kind}/v{version}/{link["file"]})'

    return _LINK.sub(replace, text)
