"""Makes a checkout ready for a package index: ``python .github/for_index.py REPOSITORY TAG``, before `python -m build`.

An index shows the README without its repository. So its links become absolute, to the files of the tag, and the
package's metadata gets the repository's addresses.
"""

import re
import sys
from pathlib import Path


def absolute(readme: str, repository: str, tag: str) -> str:
    """The README with every relative link made absolute; pictures link to the file itself."""
    files, raw = f"{repository}/blob/{tag}/", f"{repository}/raw/{tag}/"
    link = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
    return link.sub(lambda m: f"{m[1]}[{m[2]}]({raw if m[1] else files}{m[3]})", readme)


def with_addresses(project: str, repository: str, tag: str) -> str:
    """pyproject.toml with the repository's pages as ``[project.urls]``."""
    rows = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = [f'{name} = "{address}"' for name, address in rows.items()]
    return project.replace("[project.scripts]", "\n".join(["[project.urls]", *lines, "", "[project.scripts]"]), 1)


if __name__ == "__main__":
    for name, ready in (("README.md", absolute), ("pyproject.toml", with_addresses)):
        Path(name).write_text(ready(Path(name).read_text(), *sys.argv[1:]))
