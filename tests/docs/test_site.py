"""The site that `make docs` builds: without a warning, with every public name, setting and flag, on a phone too, without a network."""

from __future__ import annotations

import html
import os
import re
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote

import pytest

import distributed
from distributed.backends.capabilities import all_capabilities, settings_for_all
from distributed.cli.examples import EXAMPLES
from distributed.config.flags import SETTINGS, flag_of

pytest.importorskip("sphinx", reason="the extra docs is not installed")
pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("site")]
ROOT = Path(__file__).resolve().parents[2]
PHONE, DESK = 400, 1280  # CSS pixels
BUILD_CPU_S = 60
# The width of the page, and the words that are cut off at its right side. Code blocks and wide tables scroll by themselves.
SHOWN = """[document.documentElement.scrollWidth, [...document.querySelectorAll(".bd-article *")].filter((each) =>
    each.getBoundingClientRect().right > innerWidth + 1 && !each.closest("pre, .pst-scrollable-table-container")
).map((each) => each.textContent.slice(0, 60))]"""
LOADED = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?:[^"]+)|<link\b[^>]*rel="(?:stylesheet|preload|icon)"[^>]*href="(https?:[^"]+)"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the site with the options of `make docs`. Return its directory and the CPU time that it took."""
    made = tmp_path_factory.mktemp("site")
    (options,) = re.findall(
        r"^\t\$\(BIN\)/python (-m sphinx .*) -d \S+ docs build/docs$", (ROOT / "Makefile").read_text(), re.M
    )
    argv = [sys.executable, *options.split(), "-d", str(made / "doctrees"), "docs", str(made / "html")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    before_s = cpu_s_of_children()
    done = subprocess.run(
        argv, cwd=ROOT, env=env, timeout=240, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert "-W" in argv and (done.returncode, done.stdout) == (0, "")
    return made / "html", cpu_s_of_children() - before_s


@pytest.fixture(scope="module")
def site(built):
    """Return the directory of the site."""
    return built[0]


def cpu_s_of_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_the_build_takes_less_than_a_minute(built):
    """In CPU time, which other load hardly changes."""
    assert 0 < built[1] < BUILD_CPU_S


def pages_of(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)


def anchors(page: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', page.read_text()))


def test_every_public_name_is_in_the_reference(site):
    header, _, packed = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    names = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}

    assert header and {f"distributed.{name}" for name in distributed.__all__} - names == set()


def test_every_setting_and_every_option_has_a_row(site):
    options = [f"{each.group}.{name}" for each in all_capabilities() for name in each.options]
    rows = anchors(site / "reference" / "settings.html")
    wanted = {f"setting-{re.sub(r'[^a-z0-9]+', '-', name)}" for name in [*settings_for_all(), *options]}

    assert wanted - rows == set()
    assert {row for row in rows if row.startswith("setting-")} == wanted


def test_a_row_says_type_default_flag_meaning_and_who_refuses(site):
    text = (site / "reference" / "settings.html").read_text()
    row = re.search(r'<tr[^>]*>(?:(?!</tr>).)*id="setting-mixed-precision".*?</tr>', text, re.S)[0]
    words = " ".join(re.sub(r"<[^>]+>", " ", row).split())

    assert re.search(r"mixed_precision .*fp16 .*--mixed-precision no, fp16 or bf16 .*tensorflow \( ?fp16 ?\)", words), (
        words
    )


def test_every_command_and_every_flag_is_on_the_page(site):
    page = site / "reference" / "command-line.html"

    sections = {f"distributed-{words.replace(' ', '-')}" for words in EXAMPLES if words}
    flags = {f"train-{flag_of(name)[2:]}" for name in SETTINGS} | {"train-config", "train-set", "runs-where"}
    assert (sections | flags) - anchors(page) == set()


def test_no_page_loads_anything_from_a_network(site):
    pages = pages_of(site)

    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := re.findall(LOADED, page.read_text()))} == {}


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_in_it(site):
    places, wrong, count = {page: anchors(page) for page in pages_of(site)}, [], 0
    for page in places:
        for link in map(html.unescape, re.findall(r'\bhref="([^"]+)"', page.read_text())):
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            count += 1
            if not target.exists() or (anchor and target in places and unquote(anchor) not in places[target]):
                wrong.append(f"{page.name}: {link}")

    assert count > 1000 and wrong == []


WIDE = ("index", "how-to", "security", "reference/settings", "reference/trainer", "reference/command-line")


@pytest.mark.parametrize("page_width", [PHONE, DESK])
@pytest.mark.parametrize("names", [WIDE, pytest.param((), marks=pytest.mark.full, id="all")])
def test_no_page_scrolls_sideways(site, browser, names, page_width):
    pages = [site / f"{name}.html" for name in names] or pages_of(site)
    wide = {}
    for page in pages:
        shown = browser.open(page, width=page_width)
        shown.wait("true")
        width, cut = shown.evaluate(SHOWN)
        if width > page_width or cut:
            wide[page.name] = (width, cut)

    assert wide == {}
