"""The documentation runs: every block of README and docs is executed, every relative link leads somewhere."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tools import forked
from tools.snippets import SnippetError, blocks, commands, matches, run_page

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md"))
)
# They install packages, or wait for Triton's interpreter; CI runs them.
SLOW = {"docs/how-to/publish-a-backend.md", "docs/install.md", "docs/reference/examples/triton.md"}


def _text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def _marked(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "page", [_marked(page) for page in PAGES if any(block.runs for block in blocks(page, _text(page)))]
)
def test_the_code_of_a_page_runs(page: str) -> None:
    found = blocks(page, _text(page))
    needed = {block.notes["needs"] for block in found if "needs" in block.notes}
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed; some versions of Python cannot have it")
    # Triton reads it when it is imported, which torch does.
    interpreted = any("TRITON_INTERPRET" in block.code for block in found)
    start = forked.run_fresh if interpreted else forked.run

    done = start("-W", "error", "-m", "tools.snippets", page, cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL))

    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_block_names_its_language() -> None:
    nameless = [f"{page}:{block.line}" for page in PAGES for block in blocks(page, _text(page)) if not block.language]

    assert nameless == []


PAGE = """\
# A page

<!-- not run: needs a GPU -->

```python
raise RuntimeError
```

```python
x = 1
print(x + 1)
```

```text
2
```

Prose, and so no output of the block above.

```text
3
```

- in a list

  ```python
  if x:
      print("in", "a list")
  ```
"""


def test_blocks_are_found_with_their_lines_notes_and_outputs() -> None:
    found = blocks("page.md", PAGE)

    assert [(b.line, b.language, b.runs) for b in found] == [
        (6, "python", False),
        (10, "python", True),
        (15, "text", False),
        (21, "text", False),
        (27, "python", True),
    ]
    assert [b.expected for b in found] == [None, "2", None, None, None]
    assert found[0].notes == {"not run": "needs a GPU"}
    assert found[4].code == 'if x:\n    print("in", "a list")'


def test_the_blocks_of_a_page_share_a_namespace() -> None:
    assert run_page("page.md", PAGE) == 2


def test_a_block_that_raises_names_the_line_of_its_page() -> None:
    with pytest.raises(SnippetError, match=r"page\.md:4 raised ZeroDivisionError") as caught:
        run_page("page.md", "Text\n\n```python\na = 0\n1 / a\n```\n")

    assert caught.value.__cause__ is not None
    assert caught.traceback[-1].lineno is not None
    trace = caught.value.__cause__.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_lineno == 5


def test_an_output_that_differs_is_found() -> None:
    with pytest.raises(SnippetError, match="printed something else"):
        run_page("page.md", "```python\nprint(1)\n```\n\n```text\n2\n```\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nx = 1\n", "never closed"),
        ("<!-- not run: -->\n```python\n```\n", "needs a value"),
        ("<!-- not run: a reason -->\nprose\n```python\n```\n", "is not above a block"),
        ("<!-- not run: a reason -->\n", "is not above a block"),
    ],
)
def test_a_page_that_would_hide_code_is_refused(text: str, why: str) -> None:
    with pytest.raises(SnippetError, match=why):
        blocks("page.md", text)


def test_a_console_block_splits_into_commands_and_outputs() -> None:
    text = "```console\n$ attnplug list \\\n    --json\n{}\n...\n\n$ attnplug doctor\n```\n"

    assert commands(blocks("page.md", text)[0]) == [("attnplug list      --json", "{}\n..."), ("attnplug doctor", "")]


def test_a_console_block_runs_only_attnplug() -> None:
    with pytest.raises(SnippetError, match="only attnplug runs here"):
        run_page("page.md", "```console\n$ make demo\n```\n")


def test_the_exit_status_of_a_command_counts() -> None:
    unknown = "```console\n$ attnplug no-such-command\n```\n"

    with pytest.raises(SnippetError, match=r"exits with 2, not 0"):
        run_page("page.md", unknown)
    assert run_page("page.md", f"<!-- exits: 2 -->\n{unknown}") == 1


SCRATCH = """\
<!-- in: an empty folder -->

```console
$ attnplug new acme
acme is written to attnplug-acme:
...
$ cd attnplug-acme/src/attnplug_acme
```

<!-- shows: attnplug.toml -->

```toml
api = "1.0"
backend = ...
```

<!-- writes: notes/one.txt -->

```text
one
two
three
```

<!-- edits: notes/one.txt -->

```diff
 one
-two
+deux
@@
+2.5
 three
```

<!-- shows: notes/one.txt -->

```text
deux
2.5
three
```
"""


def test_a_page_runs_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_page("page.md", SCRATCH) == 5
    assert list(tmp_path.iterdir()) == []


def test_tests_of_a_page_run_in_their_order() -> None:
    numbers = range(9)
    file = "".join(f"def test_{number}(): pass\n" for number in numbers)
    shown = "\n".join(f"test_page.py::test_{number} PASSED ..." for number in numbers)
    page = f"""
<!-- in: an empty folder -->

```console
$ pytest --version
pytest ...
```

<!-- writes: test_page.py -->

```python
{file}
```

```console
$ pytest -v
...
{shown}
...
```
"""

    assert run_page("page.md", page) == 3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("acme is written", "it is written", r"page\.md:4 .*printed something else"),
        ("an empty folder", "some folder", "in 'an empty folder' or 'a new environment' only"),
        ("$ attnplug new acme", "$ make", "only attnplug, pytest, pip install and cd"),
        ("$ cd attnplug-acme/src", "$ cd attnplug-other/src", "only attnplug, pytest, pip install and cd"),
        ("shows: attnplug.toml", "shows: other.toml", r"page\.md:13 shows other\.toml: there is no such file"),
        ('api = "1.0"', 'api = "2.0"', r"page\.md:13 shows attnplug\.toml: it is not in the file"),
        ("-two", "-zwei", "it is in the file 0 times"),
        ("one\ntwo", "one\ntwo\none\ntwo", "it is in the file 2 times"),
        ("\ndeux\n2.5", "\ntwo\n2.5", r"page\.md:39 shows notes/one\.txt: it is not in the file"),
    ],
)
def test_a_page_that_does_not_do_what_it_says_is_found(old: str, new: str, why: str) -> None:
    assert old in SCRATCH

    with pytest.raises(SnippetError, match=why):
        run_page("page.md", SCRATCH.replace(old, new))


def test_a_page_changes_no_file_of_the_project() -> None:
    with pytest.raises(SnippetError, match="writes files only in an empty folder"):
        run_page("page.md", "<!-- writes: README.md -->\n```text\nnothing\n```\n")


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("took ... us", "took 286 us", True),
        ("a", "a\nb", False),
        ("...", "", True),
        ("a.c", "abc", False),
    ],
)
def test_an_output_matches_what_the_page_shows(expected: str, printed: str, *, same: bool) -> None:
    assert matches(expected, printed) is same


def _anchors(page: str) -> set[str]:
    """Return the anchors of a page: its headings, and the names that the build documents there."""
    prose = re.sub(r"^ *```.*?^ *```$", "", _text(page), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for text in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)]
    return {slugify(text.replace("`", ""), "-") for text in headings} | set(
        re.findall(r"^::: (\S+)$", prose, re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_relative_links_exist(page: str) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL))
    places = {
        (target, anchor): (ROOT / page).parent.joinpath(target).resolve() if target else ROOT / page
        for target, anchor in links
    }

    missing = [link for link, place in places.items() if link[1] not in _anchors(place.relative_to(ROOT).as_posix())]
    assert missing == []
