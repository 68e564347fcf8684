"""For mkdocs: links that leave docs/ (`../moeq/FORMAT.md`) lead to copies in the site, Markdown as pages of their own.

So one relative link works in the repository and on the site. tests/test_docs.py checks that what they name is there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(?<=\]\()(?:\.\./)+[^)#\s]+")


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/, and what those link to."""
    root = Path(config.config_file_path).parent
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.content_string):
            inside = _in_site(page, link)
            if inside in files.src_uris:
                continue
            path = str(root / inside)
            file = File.generated(config, inside, abs_src_path=path, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            if file.is_documentation_page():
                waiting.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links that leave docs/ name what `on_files` added."""
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: posixpath.relpath(_in_site(page.file, link[0]), here or "."), markdown)


def _in_site(page: File, link: str) -> str:
    """Where the site has what a page's relative link names: docs/ at its root, all else as in the repository."""
    folder = posixpath.dirname(page.src_uri if page.generated_by else f"docs/{page.src_uri}")
    return posixpath.normpath(posixpath.join(folder, link)).removeprefix("docs/")
