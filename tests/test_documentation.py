"""Every block, command, flag, name, file and link of the documentation is tried or checked."""

import ast
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import yaml
from documentation import commands, running
from documentation.pages import (
    ROOT,
    all_blocks,
    anchors_of,
    blocks_of,
    links_of,
    page_names,
    prose_of,
    read,
    spans_of,
)

import tfmulti
from tfmulti.launch.config import read_hosts
from tfmulti.verification import causes

PAGES = page_names()
LANGUAGES = {"python", "sh", "diff", "json", "yaml", "text"}
# Hosts of public documentation and papers.
OUTSIDE = {
    "arxiv.org",
    "jobset.sigs.k8s.io",
    "www.tensorflow.org",
    "keras.io",
    "kubernetes.io",
    "slurm.schedmd.com",
}
# Flags of other programs that prose names.
FLAGS_OF_OTHERS = {
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "check-build"),
    *("distribution", "gpus-per-task", "gpus-per-node", "gres", "mpi", "resv-ports", "signal"),
    *("kill-on-bad-exit", "ntasks"),
    # Of the programs in tests/.
    *("only", "column"),
}
# Of every entry point, and those that stand for any.
FLAGS_OF_ALL = {"help", "name", "noname", "write_readme"}
# What the fast tests run, beside README's script in test_notebook.py; the slow ones run all.
FAST_PYTHON = {"docs/howto/batch-size.md"}


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras, which takes longer than most tests here."""


def named(blocks):
    return [pytest.param(block, id=block.name) for block in blocks]


def slow_unless(pages, names):
    return [p if p in pages else pytest.param(p, marks=pytest.mark.slow) for p in names]


# What a reader sees.


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_that_is_tried(page):
    assert {block.language for block in blocks_of(page)} <= LANGUAGES
    assert not re.search(r"^```\w+ ?[^\n]*\n\s*```$", read(page), re.MULTILINE), "an empty block"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    for link in links_of(page):
        if link.startswith("http"):
            assert link.split("/")[2] in OUTSIDE, link
            continue
        path, _, anchor = link.partition("#")
        target = (here / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(str(target.relative_to(ROOT))), link


def test_pages_are_in_the_table_of_contents():
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"]
    listed = set(re.findall(r"[\w./-]+\.md", json.dumps(navigation)))
    there = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert listed == there


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_are_named_exist(page):
    known = {flag for module in commands.entry_points() for flag in commands.flags_of(module)}
    known |= {
        flag for name in commands.experiments() for flag in commands.flags_of_experiment(name)
    }
    for span in spans_of(page):
        for flag in re.findall(r"(?<![\w-])--(\w[\w-]*)", span):
            others = FLAGS_OF_OTHERS | FLAGS_OF_ALL
            assert flag.removeprefix("no") in known or flag in known | others, span


@pytest.mark.parametrize("page", PAGES)
def test_names_of_tfmulti_that_are_named_exist(page):
    for block in [b for b in blocks_of(page) if b.language == "python"]:
        for name in _names_in(block.text):
            _resolve(name)
    for span in spans_of(page):
        for name in re.findall(r"(?<![\w./-])(tfmulti(?:\.[A-Za-z_]\w*)+)", span):
            if name not in commands.entry_points():
                _resolve(name)
        for name in re.findall(r"(?<![\w.])callbacks\.([A-Z]\w+)", span):
            if "hvd" not in span:
                assert hasattr(tfmulti.callbacks, name), span


def _names_in(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"tfmulti(\.\w+)+", text):
                yield text
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfmulti"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _resolve(name):
    value = tfmulti
    for part in name.split(".")[1:]:
        if not hasattr(value, part) and importlib.util.find_spec(f"{value.__name__}.{part}"):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    for span in spans_of(page):
        for path in re.findall(r"(?<![\w/.-])(?:experiments|tf_config|docs|tests)/[\w./-]*", span):
            assert (ROOT / path).exists(), span


# Blocks that are read.


@pytest.mark.parametrize("block", named(all_blocks("python")))
def test_python_is_python(block):
    ast.parse(block.text)
    if block.is_checked_only:
        assert block.words.removeprefix("checked only: ").strip()


@pytest.mark.parametrize("block", named(all_blocks("json", "yaml")))
def test_data_are_data(block):
    if block.language == "json":
        parsed = json.loads(block.text)
        if "task" in parsed:
            servers = "ps" in parsed["cluster"]
            tfmulti.resolve_cluster(parsed, check_network=False, servers=servers)
    else:
        assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text))


@pytest.mark.parametrize("block", named(b for b in all_blocks("text") if b.file == "hosts.txt"))
def test_files_of_hosts_are_read(block, tmp_path):
    path = tmp_path / block.file
    path.write_text(block.text)
    assert read_hosts(str(path), base_port=2222)


@pytest.mark.parametrize("block", named(all_blocks("sh")))
def test_commands_are_read_by_their_parsers(block):
    found = commands.commands_of(block)
    assert found
    for command in found:
        _check_command(command)


def _check_command(command):
    if command.module:
        commands.read_by_its_parser(command)
    elif command.words[:1] == ("make",):
        targets = [word for word in command.words[1:] if "=" not in word]
        assert set(targets) <= commands.make_targets(), command
    elif command.words[:2] == ("pip", "install"):
        for extra in re.findall(r"\[(\w+)\]", " ".join(command.words)):
            assert extra in commands.extras(), command
    elif command.words:
        program = command.words[0].removeprefix(".venv/bin/")
        assert program in commands.PROGRAMS | {"python", "pip", "ruff"}, command


# Blocks that are run.


def with_python():
    # The README's script is what test_notebook.py runs; experiments have tests of their own.
    ours = [block for block in all_blocks("python") if block.page.startswith("docs/")]
    return list(
        dict.fromkeys(b.page for b in ours if not b.is_checked_only and "hidden" not in b.words)
    )


@pytest.mark.parametrize("page", slow_unless(FAST_PYTHON, with_python()))
def test_python_blocks_run(page, tmp_path):
    running.run_python(page, tmp_path)


def with_diffs():
    for block in all_blocks("diff"):
        for sign in "-+":
            fast = block.page == "README.md" and sign == "+"
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(block, sign, id=f"{block.name} {sign}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "sign"), list(with_diffs()))
def test_both_sides_of_a_diff_run(block, sign, tmp_path):
    running.run_diff(block, tmp_path, sign)


def with_commands():
    """The blocks with a command that no block before has; `train.py` is another on each page."""
    seen = set()
    for block in all_blocks("sh"):
        found = commands.commands_of(block)
        ours = {c for c in found if c.runs_here and "--help" not in c.words} - seen
        if ours and not block.is_checked_only:
            yield pytest.param(block, id=block.name)
            seen |= {c for c in ours if "train.py" not in c.words and block.words != "together"}


@pytest.mark.slow
@pytest.mark.parametrize("block", list(with_commands()))
def test_commands_run(block, tmp_path):
    running.run_shell(block, tmp_path)


# Figures and pages.


def test_the_figures_of_the_readme_are_those_of_the_tables():
    done = subprocess.run([sys.executable, ROOT / "docs" / "figures.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: make figures"


def test_the_readme_is_short():
    seen = re.sub(r"<!--.*?-->\n?", "", read("README.md"), flags=re.DOTALL)
    assert len(seen.splitlines()) <= 165


@pytest.mark.slow
def test_pages_are_made_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.html")}
    expected = {p.removeprefix("docs/").replace(".md", ".html") for p in PAGES if "docs/" in p}
    assert expected <= made
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', text), page
        assert "<!-- flags" not in text, page


def test_every_public_name_is_in_the_reference():
    python, callbacks = read("docs/reference/python.md"), read("docs/reference/callbacks.md")
    for name in set(tfmulti.__all__) - {"callbacks"}:
        assert re.search(rf"^::: [\w.]*\.{name}$", python, re.MULTILINE), name
    for name, value in vars(tfmulti.callbacks).items():
        if isinstance(value, type):
            assert re.search(rf"^::: [\w.]*\.{name}$", callbacks, re.MULTILINE), name


def test_every_entry_point_and_target_is_in_the_reference():
    page = read("docs/reference/command-line.md")
    for module in commands.entry_points():
        assert f"<!-- flags: {module} -->" in page
    for target in commands.make_targets() - {"install"}:
        assert f"`make {target}`" in prose_of("docs/reference/command-line.md"), target


def test_every_cause_is_in_a_table_of_the_pages():
    pages = [ROOT / "docs/exact.md", ROOT / "docs/howto/parity.md"]
    rows = [line for page in pages for line in page.read_text().splitlines() if line[:1] == "|"]
    told = [cause.name for cause in causes.CAUSES if cause != causes.UNKNOWN]
    missing = [name for name in told if not any(name in row for row in rows)]
    assert not missing, f"no row tells what to do about {missing}"


def test_messages_that_are_quoted_are_those_of_the_package():
    texts = list(_texts_of_the_package())
    quoted = re.findall(r'"([^"\n]{12,})"', prose_of("docs/troubleshooting.md"))
    assert quoted
    for quote in quoted:
        words = quote.replace("`", "").strip(". ")
        assert any(words in text for text in texts), quote


def _texts_of_the_package():
    for path in (ROOT / "tfmulti").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("`", "")
            elif isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                yield "".join(p for p in parts if isinstance(p, str)).replace("`", "")
