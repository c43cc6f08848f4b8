"""The README is true."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))


def test_the_table_of_methods_is_that_of_the_registry():
    import readme

    text = (ROOT / "README.md").read_text()
    assert readme.BEGIN in text
    assert readme.renewed(text) == text, "run: python scripts/readme.py"


def test_every_picture_and_file_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 2
    assert all((ROOT / link).exists() for link in links), links
