"""Hooks of MkDocs: files of the repository outside ``docs`` become part of the site.

The pages are written for GitHub as well, so they link to ``../benchmarks/README.md`` and show a
picture for light and one for dark screens by ``<picture>``. Here those links and pictures become
what MkDocs and its theme understand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Pages beside docs/, at the same place in the site, and the plots that pages show.
ADDED = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md", "benchmarks/README.md"),
    "tests/differential/named/README.md",
    *("benchmarks/results/*/tables.md", "benchmarks/results/*/*.png"),
)
IGNORED = "benchmarks/results/local/"  # what `make bench` has measured here
# Pages that the search shows behind those for users: whoever wants them knows where they are.
BEHIND = (
    *("CHANGELOG", "CONTRIBUTING", "architecture", "benchmarks", "development", "extending"),
    *("one-backward", "report", "tests/"),
)
_PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)"[^>]*alt="(?P<alt>[^"]*)">\s*</picture>'
)


def on_config(config: Any) -> None:
    """The version, at the foot of each page."""
    text = (ROOT / "tritonddp" / "__init__.py").read_text()
    config.copyright = "tritonddp " + re.findall(r'^__version__ = "(.*)"', text, re.MULTILINE)[0]


def api_pages() -> dict[str, str]:
    """``docs/api.md`` is one page for its readers on GitHub, and here one for each section."""
    _, *sections = (ROOT / "docs" / "api.md").read_text().split("\n## ")
    titles = [section.partition("\n")[0] for section in sections]
    names = [f"api/{title.lower().replace(' ', '-')}.md" for title in titles]
    return dict(zip(names, (f"# {section}" for section in sections), strict=True))


def on_files(files: Files, config: Any) -> Files:
    """Add the files of :data:`ADDED`, and the pages of the API reference."""
    for name, text in api_pages().items():
        files.append(File.generated(config, name, content=text))
    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(IGNORED):
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site, and pictures that follow its switch for dark screens."""
    if page.file.src_uri == "api.md":
        markdown = markdown.partition("\n## ")[0] + "\n"
        for name, text in api_pages().items():
            members = re.findall(r"^::: tritonddp\.(?:integrations\.)?(\S+)", text, re.MULTILINE)
            title = text.splitlines()[0].strip("# ")
            markdown += f"\n- [{title}]({name}): {', '.join(f'`{each}`' for each in members)}"
    markdown = re.sub(r"\]\(api\.md#([\w-]+)\)", r"](api/\1.md)", markdown)
    if page.file.src_uri.startswith(BEHIND):
        page.meta["search"] = {"boost": 0.1}
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta["hide"] = ["toc"]  # its tables need that room
        markdown = markdown.replace("](../docs/", "](../")
    elif page.file.src_uri.startswith("tests/"):
        markdown = markdown.replace("](../../../docs/", "](../../../")
    elif page.file.src_uri in ADDED:  # beside docs/, and now inside
        markdown = markdown.replace("](docs/", "](")
    else:
        markdown = markdown.replace("](../", "](")
    return _PICTURE.sub(
        r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", markdown
    )
