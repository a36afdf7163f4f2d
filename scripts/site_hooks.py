"""Hooks of mkdocs: they add the pages of the reference, which the source makes, and weigh pages in a search."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
# {section of docs/reference.md: its page on the site}. A link to the section leads to the page, and on GitHub to the
# section.
PAGE_OF = {'keys': 'keys', 'commands': 'verbs', 'metrics': 'metrics', 'errors': 'errors', 'python-interface': 'api'}
WEIGHTS = {'reference/keys.md': 4, 'reference/verbs.md': 3, 'reference/metrics.md': 3}


def on_files(files: Any, config: Any) -> Any:
    """Generates the pages of the reference in the environment of pretrax, which the environment of mkdocs is not."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # the tests have no mkdocs

    environment = {key: value for key, value in os.environ.items() if key != 'VIRTUAL_ENV'}
    with tempfile.TemporaryDirectory() as directory:
        command = ['uv', 'run', '--locked', 'python', 'scripts/make_reference.py', directory]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
        for page in PAGE_OF.values():
            text = Path(directory, f'{page}.md').read_text()
            files.append(File.generated(config, f'reference/{page}.md', content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links sections of docs/reference.md to the generated pages; a search finds the row of a key or a verb first."""
    if weight := WEIGHTS.get(page.file.src_uri):
        page.meta['search'] = {'boost': weight}
    return linked(markdown)


def linked(markdown: str) -> str:
    """The text of a page, with links to the generated pages in place of the sections of docs/reference.md."""
    return re.sub(r'\breference\.md#([\w-]+)\)', lambda link: f'reference/{PAGE_OF[link[1]]}.md)', markdown)
